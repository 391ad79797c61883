"""The benchmark of unlike lengths: its plans."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from megatron.dpp.sim.lengths import LengthCosts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from lengths_plans import LENGTHS, PLANS, Plans, longest_of  # noqa: E402


@pytest.mark.parametrize("mix", LENGTHS)
def test_all_plans_have_the_same_sequences_and_best_is_best(mix: str) -> None:
    rng, longest = random.Random(0), longest_of(mix)
    plans = Plans(
        mix, rng, rows=16, ranks=2, chunks=2, longest=longest, costs=LengthCosts.transformer()
    )
    for schedule in ("static", "ours"):
        times = {}
        for plan in PLANS:
            _, microbatches = plans.planned(schedule, plan)
            assert sorted(i for each in microbatches for i in each) == list(
                range(len(plans.lengths))
            )
            assert len(microbatches) % 2 == 0
            assert max(map(sum, plans.of(microbatches))) <= longest
            times[plan] = plans.seconds(schedule, microbatches)
        assert times["best"] == min(times.values())
        assert times["ordered"] <= min(times["drawn"], times["sorted"])


@pytest.mark.parametrize("schedule", ["static", "ours"])
def test_the_overhead_of_a_task_is_found_by_the_time_of_a_step(schedule: str) -> None:
    plans = Plans(
        "sft", random.Random(2), rows=8, ranks=2, chunks=2, longest=4096, costs=LengthCosts()
    )
    _, microbatches = plans.planned(schedule, "drawn")
    without = plans.seconds(schedule, microbatches)
    with_it = plans.seconds(schedule, microbatches, 50.0)
    assert with_it > without + 100
    assert plans.overhead(schedule, microbatches, with_it) == pytest.approx(50, abs=3)
    assert plans.overhead(schedule, microbatches, without) == pytest.approx(0, abs=3)
