"""Stages of torch.distributed.pipelining under the dynamic pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launcher import run_ranks

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


def test_unlike_microbatches_equal_one_process() -> None:
    late = "jitter:0.3"
    run(2, [("unlike", {"seed": seed, "inject": late}) for seed in range(4)])
