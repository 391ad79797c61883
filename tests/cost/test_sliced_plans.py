"""Plans of layouts for sequences in slices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.dpp_train.cost import planned
from megatron.dpp_train.cost.from_flags import slices_of
from megatron.dpp_train.cost.plan_command import main
from megatron.dpp_train.cost.shape import RunSchedule
from megatron.dpp_train.cost.times import planning_costs
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from tests.cost.test_memory import shape

FLAGS = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 32768 --lr 1e-3 "
    "--max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 "
    "--transformer-impl local --padded-vocab-size 65536 --pipeline-model-parallel-size 4 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60000 --eval-iters 0 --use-dpp "
    "--dpp-plan shapes "
)
SHAPES = [
    "--pp",
    "4",
    "--num-layers",
    "16",
    "--hidden-size",
    "1024",
    "--seq-length",
    "32768",
    "--vocab-size",
    "65536",
]


def run(more: str = "--dpp-slice-tokens 4096") -> Any:
    return validate(parse_args((FLAGS + more).split()), 4)


def test_a_run_is_planned_for_the_slices_that_it_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with its policy."""
    made: list[Any] = []
    kind = planned.Planner
    monkeypatch.setattr(
        planned,
        "Planner",
        lambda *given, **more: made.append((given, more)) or kind(*given, **more),
    )
    for more, number, policy in (
        ("--dpp-slice-tokens 4096 --dpp-policy dynamic", 8, "dynamic"),
        ("--dpp-slice-tokens 4096 --dpp-policy depth-first", 8, "depth-first"),
        ("--dpp-policy tests.x:mine", 1, "dynamic"),
    ):
        args = planned.take_plan(run(more))
        (costs, *_), settings = made[-1]
        assert len(costs.slices.tokens if costs.slices else [1]) == number
        assert settings["policy"] == policy
        said = planned.describe(args)
        assert ("for 8 slices of a microbatch" in said) == (number == 8)
    assert slices_of(run(), 8)[0].model.seq_length == 4096
    assert len(slices_of(run("--dpp-slice-tokens auto"), 8)) > 1


@pytest.mark.parametrize(("length", "batch"), [(8192, 8), (16384, 12)])
def test_layers_are_planned_for_the_cut_that_auto_takes(
    length: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan's own chunks and cap: it weighed one chunk per rank."""
    planned_for: dict[int, int] = {}

    class Spy(planned.Planner):
        def best(self, chunks: Any, *given: Any, **more: Any) -> Any:
            slices = self.model.slices
            chunks = list(chunks)
            planned_for.update(dict.fromkeys(chunks, len(slices.tokens) if slices else 1))
            return super().best(chunks, *given, **more)

    monkeypatch.setattr(planned, "Planner", Spy)
    args = run(f"--dpp-slice-tokens auto --seq-length {length} --global-batch-size {batch}")
    args = planned.take_plan(args)
    assert len(set(planned_for.values())) > 1, "numbers of chunks are cut otherwise"
    chunks = args.virtual_pipeline_model_parallel_size or 1
    assert len(slices_of(args, batch)) == planned_for[chunks]


def test_the_costs_of_a_run_are_cut_in_the_proportions_of_the_estimate() -> None:
    schedule = RunSchedule(dynamic=True, head_in_forward=True, slice_tokens="128")
    one = shape((4,), {"seq_length": 1024}, num_microbatches=4)
    units = dataclasses.replace(one, schedule=schedule).slices
    whole, sliced = planning_costs(one), planning_costs(one, units=units)
    run = whole.lengthened(3.0).in_slices(whole, sliced)
    assert run.slices is not None and sliced.slices is not None
    for mine, theirs in ((run.layer, sliced.layer), (run.embedding, sliced.embedding)):
        assert mine.times == pytest.approx([3 * seconds for seconds in theirs.times])
    assert run.slices.more[-1] == pytest.approx([3 * more for more in sliced.slices.more[-1]])
    assert run.layer.activation_bytes == pytest.approx(whole.layer.activation_bytes / 8)
    assert 8 * run.layer.times[0] == pytest.approx(3 * whole.layer.times[0])


def test_the_command_plans_slices_and_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPES, "--slices", "4096", "--policy", "dynamic", "--chunks", "1"]) == 0
    out = capsys.readouterr().out
    assert "sequences of 32768 tokens run in 8 slices" in out and "for a mean slice" in out
    assert "--dpp-policy dynamic --dpp-slice-tokens 4096" in out
    assert main([*SHAPES, "--slices", "32768", "--chunks", "1"]) == 0
    out = capsys.readouterr().out
    assert "run whole" in out and "--dpp-slice-tokens" not in out
    short = [*SHAPES[:6], "--seq-length", "8192", *SHAPES[8:], "--microbatches", "8"]
    assert main([*short, "--slices", "auto", "--chunks", "1,4"]) == 0
    out = capsys.readouterr().out
    assert "run in 4 slices with 1 chunks" in out and "run whole with 4 chunks" in out
    best = int(out.split("layout\n")[1].split()[0])
    assert ("--dpp-slice-tokens 2048" in out) == (best == 1)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*SHAPES, "--slices", "x"], "--slices x: expected a number of tokens, or auto"),
        (["--slices", "64", "--pp", "2"], "give a run"),
    ],
)
def test_slices_that_cannot_be_planned_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err
