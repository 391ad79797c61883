"""Stages of torch.distributed.pipelining under the dynamic pipeline."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.report import report_command
from megatron.dpp.report.reader import open_run, read_events
from tests.runtime.launcher import run_ranks, start, wait

WORKER = Path(__file__).with_name("worker.py")


def run(num_ranks: int, cases: list[tuple[str, dict[str, Any]]], timeout: float = 120.0) -> None:
    """Run cases on ranks that have no megatron-core imported."""
    output = run_ranks(WORKER, num_ranks, [json.dumps(cases)], timeout, preload="libraries")
    assert f"CASE {len(cases) - 1} ok" in output


def equal(seeds: range) -> list[tuple[str, dict[str, Any]]]:
    """Cases of random models, whose backwards are split or fused."""
    ways = ("on", "off", "stock:1")
    return [("equal", {"seed": seed, "split_backward": ways[seed % 3]}) for seed in seeds]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_to_the_schedules_of_torch(num_ranks: int) -> None:
    run(num_ranks, equal(range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_equal_to_the_schedules_of_torch(num_ranks: int) -> None:
    run(num_ranks, equal(range(4, 44)), 280.0)


@pytest.mark.slow
def test_the_example_learns() -> None:
    pytest.importorskip("peft")
    example = Path(__file__).parents[2] / "examples" / "torch_lora.py"
    output = run_ranks(example, 2, ["--steps", "10"], 250.0, preload="libraries")
    first, *_, last = map(float, re.findall(r"step \d+: loss ([0-9.]+)", output))
    assert last < 0.95 * first


def test_gradients_of_replicas_are_reduced_as_by_torch() -> None:
    run(4, [(how, {"seed": seed}) for seed in (1, 3) for how in ("ddp", "fsdp")])


def test_ranks_that_communicate_within_tasks_run_one_order() -> None:
    run(4, [(how, {"seed": seed}) for how in ("together", "tensor") for seed in range(2)])


def test_refused_in_one_line_on_all_ranks() -> None:
    run(2, [("refused", {}), ("frozen", {}), ("processes", {})])


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_killed_rank_is_named_at_once(step: int) -> None:
    cases = json.dumps([("dies", {"step": step})])
    first, second = wait(start(WORKER, 2, [cases], preload="libraries"), 60.0)
    assert second.returncode == -9
    assert first.returncode == 1 and "PeerDead: rank 0: rank 1 (pid" in first.output


def test_the_report_reads_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, [("traced", {"folder": str(tmp_path)})])
    files = open_run(tmp_path / "data-1-pipeline-2-tensor-1-dpp")
    tasks = Counter(
        (event["args"]["kind"], event["args"]["iteration"])
        for file in files
        for event in read_events(file, ("task",))
    )
    assert {step for _, step in tasks} == {0, 2, 3}
    assert tasks["F", 0] == tasks["B", 0] == 2 * 2 * 4 <= tasks["W", 0]
    assert report_command.main([str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out


def test_unlike_microbatches_equal_one_process() -> None:
    late = "jitter:0.3"
    run(2, [("unlike", {"seed": seed, "inject": late}) for seed in range(4)])
