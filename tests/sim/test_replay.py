"""Replaying a recorded order takes the time of the simulation that recorded it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule import Action, Kind
from megatron.dpp.sim.conditions import CONDITIONS, condition_costs
from megatron.dpp.sim.costs import Costs, Hop, Shape, even_costs
from megatron.dpp.sim.schedules import ScheduleConfig, replay

STEADY = [name for name in CONDITIONS if not name.startswith("tr")]


@settings(max_examples=60)
@given(
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    pieces=st.integers(1, 3),
    condition=st.sampled_from(STEADY),
    seed=st.integers(0, 99),
)
def test_a_simulated_run_replays_in_its_own_time(
    p: int, v: int, m: int, pieces: int, condition: str, seed: int
) -> None:
    shape = Shape(p, v if p > 1 else 1, m)
    drawn = condition_costs(condition, shape, seed)
    hops = [Hop(h.latency, 0.0, h.scale) for h in drawn.hops]
    costs = Costs(drawn.durations, hops, overhead={0: 0.05, 2: 0.01})
    result = ScheduleConfig(w_pieces=pieces).run(shape, costs)
    assert replay(result.actions, costs, shape.num_chunks) == pytest.approx(result.makespan)


def test_an_order_is_kept_where_another_would_be_faster() -> None:
    """Two weight gradients first, although a forward that the next rank waits for is ready."""
    costs = even_costs(2, 2)
    good = ScheduleConfig(cap="none").run(Shape(2, 1, 2), costs)
    bad = [sorted(good.actions[0], key=lambda a: (a.microbatch, a.kind)), good.actions[1]]
    assert replay(bad, costs, 1) > good.makespan


def test_orders_that_wait_for_each_other_are_refused() -> None:
    order = [Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]
    with pytest.raises(ScheduleError, match="stuck"):
        replay([order, [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], even_costs(2, 1), 1)


def test_a_message_does_not_overtake_the_one_before() -> None:
    late = Hop(1.0, 0.0, ([5.0, 0.0], [0.0, 0.0]))
    zero = [[0.0] * 2] * 2
    costs = Costs(([[1.0] * 2] * 2, zero, zero), [late])
    orders = [[Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)]] * 2
    assert replay(orders, costs, 1) == 1.0 + 5.0 + 2 * 1.0
