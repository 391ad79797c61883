"""``train --mode auto``: the layouts that it finds, and their estimates."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train import tokenizers
from megatron.dpp_train.cost.estimate import estimate
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.launch import auto, cli, resolve
from megatron.dpp_train.launch.checked import shape_from
from megatron.dpp_train.launch.layout import Layout
from megatron.dpp_train.launch.main import find_devices, plain_shape, plan
from megatron.dpp_train.launch.nodes import find_nodes
from megatron.dpp_train.launch.resolve import Devices, base_flags
from megatron.dpp_train.launch.start import prepare
from tests.launch.test_train import H200


def best_for(words: str, devices: Devices = H200, **changes: int) -> list[auto.Candidate]:
    """The candidates of ``auto`` on ``devices``."""
    options, rest = cli.parse(words.split())
    flags = base_flags(options, [*rest, "--padded-vocab-size", "50304"], devices)
    flags |= prepare("gpt", None, flags).flags
    plain = plain_shape(options, flags, devices)
    return auto.candidates(options, flags, devices, plain, **changes)


@pytest.fixture(scope="module")
def for_medium() -> list[auto.Candidate]:
    return best_for("--mode auto --model medium")


def test_auto_takes_data_parallel_while_the_model_fits(for_medium: list[auto.Candidate]) -> None:
    best = for_medium[0].command()
    assert best.startswith(("--mode simple", "--mode zero --zero-stage 1"))
    assert any("why" in line for line in auto.report(for_medium[:3], H200))


@pytest.mark.parametrize(
    "model",
    [
        "medium",
        pytest.param("large", marks=pytest.mark.slow),
        "large --no-dpp --batch-size 2",
    ],
)
def test_what_auto_estimates_is_what_its_command_runs(model: str) -> None:
    """Planned pipelines, even pipelines and replicas: one layout of each."""
    words = f"--model {model} --gpu H200 --gpus 8 --dry-run --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 50303"
    options, rest = cli.parse(words.split())
    devices = find_devices(options, find_nodes({}))
    flags = base_flags(options, rest, devices)
    flags |= prepare("gpt", None, flags).flags
    found = auto.candidates(options, flags, devices, plain_shape(options, flags, devices))
    assert any(each.planned for each in found) == (not options.no_dpp)
    kinds = {(each.layout.pipeline > 1, each.layout.chunks > 1): each for each in found}
    for each in kinds.values():
        again = plan([*each.command().split(), *words.replace("--no-dpp", "").split()])
        assert {**each.resolved.flags, **again.resolved.flags} == again.resolved.flags
        assert estimate(shape_from(again.resolved, devices), devices.device) == each.estimate


@pytest.mark.parametrize(
    "more",
    [
        "large --num-layers 48 --hidden-size 4096 --no-dpp",
        "medium --dpp-slice-tokens auto --seq-length 8192 --batch-size 8",
    ],
)
def test_auto_leaves_out_only_what_cannot_be_among_the_best(more: str) -> None:
    words = f"--mode auto --model {more}"
    best = best_for(words)[:3]
    every = best_for(words, count=10)
    assert len(every) > 6
    assert [each.command() for each in every[:3]] == [each.command() for each in best]
    assert all(each.least_seconds <= each.estimate.seconds * (1 + 1e-12) for each in every)


LONG = (
    "--model llama3-8b --num-layers 4 --transformer-impl transformer_engine --seq-length 98304 "
    "--max-position-embeddings 98304 --batch-size 4 --gpu H100 --gpus 2 --dry-run --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128255"
)
"""Whole sequences fit in no layout."""


def test_auto_cuts_sequences_where_no_layout_holds_whole_ones() -> None:
    best = plan(["--mode", "auto", *LONG.split()])
    assert best.resolved.flags["--dpp-slice-tokens"] == "auto"
    assert any("whole sequences fit in no layout" in line for line in best.heading)
    command = next(line for line in best.heading if line.startswith("1 ")).partition("--mode")
    again = plan([*"".join(command[1:]).removesuffix(" (planned)").split(), *LONG.split()])
    assert again.estimate == best.estimate
    with pytest.raises(ConfigError, match=r"nearest that fits: .* --dpp-slice-tokens auto"):
        plan(["--mode", "3d", "--pp", "2", "--tp", "1", *LONG.split()])


@pytest.mark.parametrize("asked", ["--no-dpp", "--dpp-slice-tokens off", "--window-size 128,0"])
def test_auto_cuts_no_sequences_against_other_settings(asked: str) -> None:
    with pytest.raises(ConfigError, match="no layout fits: the least"):
        plan(["--mode", "auto", *asked.split(), *LONG.split()])


def test_auto_says_which_layouts_are_planned(for_medium: list[auto.Candidate]) -> None:
    text = auto.report([each for each in for_medium if each.planned][:1], H200)
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


def forms_tried(
    words: str, devices: Devices, heads: int, *, by_engine: bool = False
) -> list[auto.Form]:
    """The forms that ``auto`` looks at."""
    tried: list[auto.Form] = []
    options, rest = cli.parse(words.split())
    flags = base_flags(options, [*rest, "--padded-vocab-size", "49152"], devices)
    flags |= prepare("gpt", None, flags).flags
    plain = plain_shape(options, flags, devices)
    model = dataclasses.replace(plain.model, num_heads=heads)
    plain = dataclasses.replace(plain, model=model, gathers_keys=not by_engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            auto, "shape_with", lambda plain, devices, form, *, static: tried.append(form)
        )
        assert auto.candidates(options, flags, devices, plain) == []
    return tried


def test_auto_lays_no_tensor_parallel_group_across_nodes() -> None:
    """Groups of 4 do not lie within nodes of 6."""
    two_of_six = dataclasses.replace(H200, per_node=6, num_nodes=2)
    tried = forms_tried("--mode auto --model large --hidden-size 12288", two_of_six, 96)
    assert {form.layout.tensor for form in tried} == {1, 2, 3, 6}


def test_ranks_that_share_a_sequence_may_share_an_optimizer() -> None:
    two = dataclasses.replace(H200, per_node=2)
    tried = forms_tried("--mode auto --model large", two, 16, by_engine=True)
    shards = {
        layout: {form.shard for form in tried if form.layout == layout}
        for layout in (Layout(), Layout(context=2), Layout(tensor=2))
    }
    assert shards == {
        Layout(): {"none", "optimizer", "parameters"}, Layout(context=2): {"none", "optimizer"},
        Layout(tensor=2): {"none"},
    }  # fmt: skip


# One layout at a time -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> RunShape:
    """12 sequences of a model of 8 layers."""
    options, rest = cli.parse(["--mode", "auto", "--model", "sample", "--batch-size", "12"])
    flags = base_flags(options, [*rest, "--padded-vocab-size", "2048"], H200)
    flags |= prepare("gpt", None, flags).flags
    return plain_shape(options, flags, H200)


@pytest.mark.parametrize(
    ("sizes", "micro", "static", "microbatches"),
    [
        ({}, 3, False, 1), ({}, 2, False, None),
        ({"pipeline": 2, "chunks": 2}, 2, False, 3), ({"pipeline": 2, "chunks": 2}, 2, True, None),
        ({"pipeline": 2}, 2, True, 3), ({"pipeline": 4}, 4, False, None),
    ],
)  # fmt: skip
def test_a_batch_is_dealt_out_to_replicas_and_filled_pipelines(
    plain: RunShape, sizes: dict[str, int], micro: int, static: bool, microbatches: int | None
) -> None:
    devices = dataclasses.replace(H200, per_node=4)
    form = auto.Form(layout=Layout(**sizes), shard="none", spread=False, micro_batch=micro)
    shape = auto.shape_with(plain, devices, form, static=static)
    assert (shape and shape.num_microbatches) == microbatches
    assert shape is None or shape.global_batch == 12


def candidate(shard: str, recompute: str = "none", *flags: str, **sizes: int) -> auto.Candidate:
    more: Any = {"estimate": None, "resolved": SimpleNamespace(flags=flags)}
    return auto.Candidate(
        layout=Layout(**sizes), shard=shard, spread=False, recompute=recompute, micro_batch=2,
        planned=False, least_seconds=1.0, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "parts", "words"),
    [
        (candidate("none"), 0, "--mode simple"),
        (candidate("parameters"), 3, "--mode zero --zero-stage 3"),
        (candidate("none", "full"), 1, "--mode simple --recompute full"),
        (candidate("none", tensor=2), 1, "--mode 3d --tp 2 --pp 1"),
        (candidate("none", pipeline=2), 1, "--mode 3d --tp 1 --pp 2 --no-dpp"),
        (candidate("optimizer", "full", "--use-dpp", tensor=2, pipeline=2, chunks=2), 5,
         "--mode 3d --tp 2 --pp 2 --chunks 2 --use-distributed-optimizer --recompute full"),
    ],
)  # fmt: skip
def test_each_part_of_a_layout_counts_and_is_an_option(
    made: auto.Candidate, parts: int, words: str
) -> None:
    assert (made.parts, made.command()) == (parts, f"{words} --micro-batch-size 2")
    assert made.least_cost == pytest.approx(1.0 + 0.02 * parts)


@pytest.mark.parametrize(("need", "gpus"), [(1.2, 16), (2.0, 16), (2.1, 24)])
def test_the_devices_that_would_do_are_whole_nodes(
    plain: RunShape, need: float, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dataclasses.replace(plain, num_microbatches=16, micro_batch=1, data=1)
    usable = 0.92 * H200.device.memory_bytes
    monkeypatch.setattr(auto, "possible_layouts", lambda *_: [Layout()])
    monkeypatch.setattr(auto, "least_bytes", lambda shape: need * usable)
    monkeypatch.setattr(auto, "is_planned", lambda *_: False)
    options, rest = cli.parse(["--mode", "auto", "--model", "sample"])
    flags = base_flags(options, rest, H200)
    assert f"about --gpus {gpus}, " in auto.why_nothing_fits(options, flags, H200, plain)


@pytest.mark.parametrize(("share", "fits"), [(0.919, True), (0.93, False)])
def test_a_share_of_the_memory_is_left_free(
    share: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = SimpleNamespace(peak_bytes=share * H200.device.memory_bytes, seconds=2.0)
    monkeypatch.setattr(auto, "possible_layouts", lambda *_: [Layout()])
    monkeypatch.setattr(auto, "estimate", lambda *_: guess)
    found = best_for("--mode auto --model sample --batch-size 16")
    assert bool(found) is fits
    assert not fits or found[0].cost == pytest.approx(2.0)


def test_all_layouts_share_one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them built its own: seconds, with a vocabulary of 128k tokens."""
    built: list[str] = []

    def count(kind: str, *files: str, **options: Any) -> tokenizers.Tokenizer:
        built.append(kind)
        return tokenizers.build_tokenizer(kind, *files, **options)

    monkeypatch.setattr(resolve, "build_tokenizer", count)
    found = plan(
        ["--mode", "auto", "--dry-run", "--gpu", "H100", "--gpus", "8", "--model", "small"]
    )
    assert found.resolved.parsed.transformer_impl is not None
    assert built == ["GPT2BPETokenizer"]
