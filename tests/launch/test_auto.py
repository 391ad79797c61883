"""``train --mode auto``: the layouts that it finds, and their estimates."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.dpp.launch import auto, cli
from megatron.dpp.launch.layout import Layout
from megatron.dpp.launch.main import _plain, find_setting, plan
from megatron.dpp.launch.nodes import find_nodes
from megatron.dpp.launch.resolve import Setting, base_flags
from megatron.dpp.launch.settle import shape_from
from megatron.dpp.launch.start import prepare
from megatron.dpp.plan.estimate import estimate
from tests.launch.test_train import H200


def best_for(words: str, setting: Setting = H200) -> list[auto.Candidate]:
    """The candidates of ``auto`` on ``setting``."""
    options, rest = cli.parse(words.split())
    flags = base_flags(options, [*rest, "--padded-vocab-size", "50304"], setting)
    flags |= prepare("gpt", None, flags).flags
    return auto.candidates(options, flags, setting, _plain(options, flags, setting))


def test_auto_takes_data_parallel_while_the_model_fits() -> None:
    best = best_for("--mode auto --model medium")
    assert best[0].command().startswith(("--mode simple", "--mode zero --zero-stage 1"))
    assert any("why" in line for line in auto.report(best[:3], H200))


@pytest.mark.parametrize("model", ["medium", "large", "large --no-dpp --batch-size 2"])
def test_what_auto_estimates_is_what_its_command_runs(model: str) -> None:
    """Planned pipelines, even pipelines and replicas: one layout of each."""
    words = f"--model {model} --gpu H200 --gpus 8 --dry-run --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 50303"
    options, rest = cli.parse(words.split())
    setting = find_setting(options, find_nodes({}))
    flags = base_flags(options, rest, setting)
    flags |= prepare("gpt", None, flags).flags
    found = auto.candidates(options, flags, setting, _plain(options, flags, setting))
    assert any(each.planned for each in found) == (not options.no_dpp)
    kinds = {(each.layout.pipeline > 1, each.layout.chunks > 1): each for each in found}
    for each in kinds.values():
        again = plan([*each.command().split(), *words.replace("--no-dpp", "").split()])
        assert {**each.resolved.flags, **again.resolved.flags} == again.resolved.flags
        assert estimate(shape_from(again.resolved, setting), setting.device) == each.estimate


def test_auto_leaves_out_only_what_cannot_be_among_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "--mode auto --model large --num-layers 48 --hidden-size 4096 --no-dpp"
    best = best_for(words)[:3]
    monkeypatch.setattr(auto, "_SHOWN", 1000)
    every = best_for(words)
    assert len(every) > 6
    assert [each.command() for each in every[:3]] == [each.command() for each in best]
    assert all(each.least_seconds <= each.estimate.seconds for each in every)


def test_auto_says_which_layouts_are_planned() -> None:
    best = best_for("--mode auto --model medium")
    text = auto.report([each for each in best if each.planned][:1], H200)
    assert text[1].endswith(" (planned)")
    assert text[2].startswith("planned: ")


def test_auto_shares_out_what_does_not_fit() -> None:
    best = best_for("--mode auto --model large --num-layers 48 --hidden-size 8192")
    limit = H200.device.memory_bytes
    assert best
    assert all(each.estimate.peak_bytes <= limit for each in best)
    assert all(each.layout != Layout() or each.shard == "parameters" for each in best)
    for each in best[:3]:
        shape_from(each.resolved, H200)  # its flags are possible


def test_auto_lays_no_tensor_parallel_group_across_nodes() -> None:
    """Groups of 4 do not lie within nodes of 6."""
    two_of_six = dataclasses.replace(H200, per_node=6, num_nodes=2)
    options, rest = cli.parse(["--mode", "auto", "--model", "large", "--hidden-size", "12288"])
    flags = base_flags(options, [*rest, "--padded-vocab-size", "49152"], two_of_six)
    flags |= prepare("gpt", None, flags).flags
    plain = _plain(options, flags, two_of_six)
    plain = dataclasses.replace(plain, model=dataclasses.replace(plain.model, num_heads=96))
    layouts = [layout for layout, _ in auto._layouts(options, flags, two_of_six, plain)]
    assert {layout.tensor for layout in layouts} == {1, 2, 3, 6}
