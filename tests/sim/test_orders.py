"""The planner of microbatch orders: bounds, and the gains that it is there for."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Geometry, Scheduler
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts
from megatron.dpp.sim.orders import (
    PlannedOrder,
    best_order,
    in_order,
    plan_order,
    simulated,
)
from megatron.dpp.sim.schedules import ScheduleConfig, run_static


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 2),
    config=st.builds(
        ScheduleConfig,
        policy=st.sampled_from(["megatron", "dynamic"]),
        cap=st.sampled_from(["static", "auto", "strict"]),
        split_backward=st.booleans(),
        sizes_at_start=st.just(True),
    ),
)
def test_a_planned_order_is_never_slower_and_holds_no_more(
    sizes: list[int], num_ranks: int, num_chunks: int, config: ScheduleConfig
) -> None:
    """At equal memory; its times are those of whole simulations."""
    chunks = num_chunks if num_ranks > 1 else 1
    plan = plan_order(sizes, num_ranks, num_chunks=chunks, config=config, simulations=4)
    assert sorted(plan.order) == list(range(len(sizes)))
    assert plan.time <= plan.drawn_time
    assert plan.held <= plan.drawn_held * (1 + 1e-6)
    if plan.name == "drawn":
        assert plan.order == list(range(len(sizes))) and plan.gain == 0
    else:
        assert plan.gain > 0.002
    works = [(size, size * size) for size in sizes]
    costs = LengthCosts.transformer().of_works(works, num_ranks, chunks, 0.01)
    shape = Shape(num_ranks, chunks, len(sizes), tuple(sizes), max(sizes))
    found = config.run(*in_order(plan.order, shape, costs))
    assert found.makespan == pytest.approx(plan.time)
    assert max(found.peak_held) == pytest.approx(plan.held)


def test_a_plan_depends_on_sizes_and_settings_alone() -> None:
    sizes = [sum(row) for row in MIXES["sft"].draw(random.Random(1), 10)]
    plans = [plan_order(sizes, 2, num_chunks=2, simulations=20) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].order != sorted(range(10))


@pytest.mark.parametrize(("sizes", "num_ranks"), [([7] * 8, 4), ([3, 9, 1], 1)])
def test_equal_microbatches_and_one_rank_stay_as_drawn(sizes: list[int], num_ranks: int) -> None:
    assert plan_order(sizes, num_ranks).name == "drawn"


@pytest.mark.parametrize("sizes", [[], [0, 3], [3, -1]])
def test_sizes_are_tokens(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected tokens of each microbatch"):
        plan_order(sizes, 2)


def shares(seed: int) -> list[float]:
    """Times of 16 rows on four ranks of two chunks over the static schedule's, as drawn: Megatron's
    order + W, dynamic, Megatron's order + W and static in their best named orders, climbed, bound.
    """
    rows = MIXES["packed"].draw(random.Random(f"lengths {seed}"), 16)
    works = [(sum(row), sum(length * length for length in row)) for row in rows]
    sizes, squares = (tuple(each) for each in zip(*works, strict=True))

    def plan(policy: str, simulations: int = 0) -> PlannedOrder:
        return plan_order(
            sizes, 4, num_chunks=2, squares=squares, memory=None, simulations=simulations,
            config=ScheduleConfig(policy=policy, cap="static", sizes_at_start=True),
        )  # fmt: skip

    costs, shape = LengthCosts.transformer().of_works(works, 4, 2, 0.01), Shape(4, 2, 16, sizes)
    run = partial(run_static, "interleaved")
    static = best_order(shape, costs, simulated(run, shape, costs))
    named, climbed, dynamic = plan("megatron"), plan("megatron", 200), plan("dynamic")
    times = [named.drawn_time, dynamic.drawn_time, named.time, static.time, climbed.time]
    own = max(run(shape, costs).own)
    return [each / static.drawn_time for each in (*times, own)]


def test_orders_of_packed_rows_gain_what_the_page_says() -> None:
    """Of five of the draws of the table in docs/simulator.md, whose means are within a point."""
    found = map(statistics.fmean, zip(*map(shares, range(5)), strict=True))
    assert list(found) == pytest.approx([0.940, 0.958, 0.854, 0.892, 0.847, 0.806], abs=0.01)


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "sizes", "policy"),
    [
        (2, 1, [5] * 8, "eager"),
        (2, 1, [9, 8, 9, 7, 9, 9, 8, 9], "eager"),
        (4, 1, [5] * 8, "eager"),
        (4, 1, [9, 8, 9, 7, 9, 9, 8, 9], "eager"),
        (4, 1, [9, 1, 9, 1, 2, 9, 3, 1], "dynamic"),
        (2, 2, [9, 1, 9, 1, 2, 9, 3, 1], "megatron"),
        (4, 2, [9, 8, 9, 7, 9, 9, 8, 9], "megatron"),
        (4, 2, [9, 1, 9, 1, 2, 9, 3, 1], "dynamic"),
    ],
)
def test_the_policy_auto_is_chosen_by_case(
    num_ranks: int, num_chunks: int, sizes: list[int], policy: str
) -> None:
    costs = LengthCosts().of_works([(n, 0) for n in sizes], num_ranks, num_chunks)
    shape = Shape(num_ranks, num_chunks, len(sizes), tuple(sizes))
    found = [
        ScheduleConfig(policy=name, sizes_at_start=True).run(shape, costs).actions
        for name in ("auto", policy)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("mix", "most"), [("sft", 0.79), ("packed", 0.85)])
def test_a_deeper_warm_up_uses_the_memory_of_the_cap(mix: str, most: float) -> None:
    """The table of docs/policies.md: time over that of Megatron's order + W, at one cap."""
    times = []
    for seed in range(3):
        rows = MIXES[mix].draw(random.Random(f"lengths {seed}"), 16)
        works = [(sum(row), sum(length * length for length in row)) for row in rows]
        costs = LengthCosts.transformer().of_works(works, 4, 1, 0.01)
        shape = Shape(4, 1, 16, tuple(map(sum, rows)), MIXES[mix].longest)
        runs = [ScheduleConfig(policy=name).run(shape, costs) for name in ("eager", "megatron")]
        times.append(runs[0].makespan / runs[1].makespan)
        assert max(runs[0].peak_held) <= 6 + 1e-6
    assert statistics.fmean(times) == pytest.approx(most, abs=0.03)


@pytest.mark.parametrize("caps", [[8.0, 3.0, 7.0, 2.0], [4.0, 6.0, 2.0, 9.0]])
@pytest.mark.parametrize("seed", range(6))
def test_a_deeper_warm_up_ends_whatever_each_ranks_cap(caps: list[float], seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 40) for _ in range(12)]
    lanes = [
        Scheduler(Geometry(4, rank, 1, 12), policy="eager", cap=cap, largest=40, sizes=sizes)
        for rank, cap in enumerate(caps)
    ]
    times = [[rng.random() for _ in sizes] for _ in range(4)]
    costs = Costs((times, times, times), [Hop(rng.random(), 0.0)] * 3)
    assert sum(map(len, simulate(lanes, costs, split_backward=True).actions)) == 4 * 3 * 12
