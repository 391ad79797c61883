"""The planner of microbatch orders: bounds, and the gains that it is there for."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts
from megatron.dpp.sim.orders import PlannedOrder, best_order, plan_order
from megatron.dpp.sim.schedules import run_static


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 2),
    policy=st.sampled_from(["megatron", "dynamic"]),
)
def test_a_planned_order_is_never_slower_and_holds_no_more(
    sizes: list[int], num_ranks: int, num_chunks: int, policy: str
) -> None:
    chunks = num_chunks if num_ranks > 1 else 1
    plan = plan_order(sizes, num_ranks, num_chunks=chunks, policy=policy, simulations=4)
    assert sorted(plan.order) == list(range(len(sizes)))
    assert plan.result.makespan <= plan.drawn.makespan
    assert max(plan.result.peak_held) <= max(plan.drawn.peak_held) * (1 + 1e-6)
    assert plan.result.makespan >= max(plan.drawn.own) * (1 - 1e-9)
    if plan.name == "drawn":
        assert plan.order == list(range(len(sizes))) and plan.gain == 0
    else:
        assert plan.gain > 0.002


def test_a_plan_depends_on_sizes_and_settings_alone() -> None:
    sizes = [sum(row) for row in MIXES["sft"].draw(random.Random(1), 10)]
    plans = [plan_order(sizes, 2, num_chunks=2, simulations=20) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].order != sorted(range(10))


def test_a_simulated_plan_is_that_of_its_schedule() -> None:
    """The schedule takes what the planner promises, with the microbatches in that order."""
    sizes = [5000, 100, 9000, 400, 3000, 700]
    plan = plan_order(sizes, 2, simulations=30)
    again = plan_order([sizes[i] for i in plan.order], 2, simulations=0)
    assert again.drawn.makespan == pytest.approx(plan.result.makespan)


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
            sizes, 4, num_chunks=2, squares=squares, policy=policy, memory=None,
            simulations=simulations,
        )  # fmt: skip

    costs, shape = LengthCosts.transformer().of_works(works, 4, 2, 0.01), Shape(4, 2, 16, sizes)
    static = best_order(shape, costs, partial(run_static, "interleaved"))
    named, climbed, dynamic = plan("megatron"), plan("megatron", 60), plan("dynamic")
    times = [named.drawn, dynamic.drawn, named.result, static.result, climbed.result]
    drawn = static.drawn.makespan
    return [*(each.makespan / drawn for each in times), max(static.drawn.own) / drawn]


def test_orders_of_packed_rows_gain_what_the_page_says() -> None:
    """The table of docs/simulator.md, to a point."""
    found = map(statistics.fmean, zip(*map(shares, range(5)), strict=True))
    assert list(found) == pytest.approx([0.940, 0.958, 0.854, 0.892, 0.847, 0.806], abs=0.01)
