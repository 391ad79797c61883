"""Costs, conditions, fixed orders and static schedules, each by its definition."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Action, Geometry, Kind, Memory
from megatron.dpp.sim import conditions
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.conditions import condition_costs, rank_forward, uniform
from megatron.dpp.sim.costs import Costs, Hop, Shape, SlowTimes, even_costs
from megatron.dpp.sim.lengths import MIXES, LengthCosts, parse_lengths
from megatron.dpp.sim.schedules import (
    FixedOrder,
    ScheduleConfig,
    gpipe_order,
    join_chunks,
    replay,
    run_static,
    zb_h1_order,
)

# Costs --------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.5, 9.0), min_size=2, max_size=8), st.floats(1.5, 4.0),
    st.floats(0.0, 40.0), st.floats(0.01, 20.0),
)  # fmt: skip
@settings(max_examples=30)
def test_slow_times_lengthen_work_by_their_factor(steps, factor, start, work):
    """Against a walk in small steps, and in one piece or two."""
    edges, intervals = 0.0, []
    for healthy, slow in zip(steps[::2], steps[1::2], strict=False):
        intervals.append((edges + healthy, edges + healthy + slow))
        edges += healthy + slow
    slow_times = SlowTimes(intervals, factor)
    end = slow_times.end(start, work)
    inside = sum(max(0.0, min(end, b) - max(start, a)) for a, b in intervals)
    assert end - start == pytest.approx(work + inside * (1 - 1 / factor))
    half = slow_times.end(start, work / 2)
    assert slow_times.end(half, work / 2) == pytest.approx(end)


# The clock ----------------------------------------------------------------------------------------


def test_a_message_with_little_to_travel_does_not_overtake_its_channel():
    """The first message has a latency of 9, the second none; both leave at once."""
    durations = ([[1.0] * 2, [0.1] * 2], [[0.1] * 2] * 2, [[0.0] * 2] * 2)
    costs = Costs(durations, [Hop(1.0, 0.0, [[9.0, 0.0], [0.0] * 2])])
    result = ScheduleConfig(cap="2p").run(Shape(2, 1, 2), costs)
    starts = [slot.start for slot in result.slots[1] if slot.action.kind is Kind.F]
    assert starts[0] == 10.0 and starts[1] >= starts[0]


def test_a_gradient_returns_over_the_hop_that_its_activation_took():
    costs = even_costs(3, 1)
    costs = Costs(costs.durations, [Hop(10.0, 0.0), Hop(2.0, 0.0)])
    result = run_static("1f1b", Shape(3, 1, 1), costs)
    starts = [[slot.start for slot in slots] for slots in result.slots]
    assert starts == [[0.0, 31.0], [11.0, 19.0], [14.0, 15.0]]


def test_a_slow_time_counts_from_the_start_of_a_task():
    """The overhead keeps the rank from starting at once; it is slow from 2 on."""
    costs = even_costs(1, 2)
    costs = Costs(costs.durations, [], {0: SlowTimes([(2.0, 100.0)])}, {0: 1.5})
    order = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1), Action(Kind.B, 0, 0), Action(Kind.B, 0, 1)]
    result = simulate([FixedOrder(order, Geometry(1, 0, 1, 2))], costs, split_backward=False)
    assert [(slot.start, slot.end) for slot in result.slots[0]] == [
        (0.0, 1.0), (2.5, 4.5), (6.0, 10.0), (11.5, 15.5),
    ]  # fmt: skip
    assert result.own == [pytest.approx(2.0 + 2 * 4.0)]


class Eager(FixedOrder):
    """Runs the backward of microbatch 0 as soon as it may, before the second forward."""

    def next(self):
        backward = self._order[2]
        if self._position == 1 and self._is_here(backward):
            self._order = [self._order[0], backward, self._order[1], *self._order[3:]]
        return super().next()


def test_a_rank_chooses_after_its_overhead():
    """The gradient arrives 0.3 after the task's end, the next one may start 1 after it."""
    quiet = even_costs(2, 2)
    durations = tuple([kind[0], [0.1] * 2] for kind in quiet.durations)
    costs = Costs(durations, [Hop(0.0, 0.0)], overhead={0: 1.0})
    order = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1), Action(Kind.B, 0, 0), Action(Kind.B, 0, 1)]
    one_by_one = [order[0], order[2], order[1], order[3]]
    lanes = [Eager(order, Geometry(2, 0, 1, 2)), FixedOrder(one_by_one, Geometry(2, 1, 1, 2))]
    ran = simulate(lanes, costs, split_backward=False).slots[0]
    assert ran[1].action == order[2] and ran[1].start == 2.0


def test_memory_is_counted_in_the_longest_that_may_come():
    """Four short ones are a quarter of it, also under a cap for one of the longest."""
    config = ScheduleConfig(cap="strict", sizes_at_start=True)
    found = config.run(Shape(1, 1, 4, (1, 1, 1, 1), 16), even_costs(1, 4))
    assert max(found.peak_held) <= 4 / 16


def test_pieces_of_a_weight_gradient_share_its_time():
    result = ScheduleConfig(w_pieces=4).run(Shape(1, 1, 1), even_costs(1, 1, times=(1.0, 2.0, 4.0)))
    assert [slot.end - slot.start for slot in result.slots[0]] == [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


# Fixed orders -------------------------------------------------------------------------------------


def order_text(order: list[Action]) -> str:
    return " ".join(f"{action.kind.name}{action.microbatch}" for action in order)


def test_zb_h1_defers_the_weight_gradients_of_its_rank():
    """Figure 2 of the paper: rank r of p has p - 1 - r warm-up forwards and r deferred W."""
    found = [order_text(zb_h1_order(Geometry(3, rank, 1, 4))) for rank in range(3)]
    assert found == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert order_text(zb_h1_order(Geometry(3, 0, 1, 1))) == "F0 B0 W0"
    assert order_text(gpipe_order(Geometry(3, 1, 1, 2))) == "F0 F1 B0 B1"


def test_a_fixed_order_waits_for_the_message_of_its_task():
    order = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1), Action(Kind.B, 0, 0), Action(Kind.W, 0, 0)]
    lane = FixedOrder(order, Geometry(3, 1, 1, 2), split=True, shares=[1.0, 0.5])
    assert lane.next() is None
    lane.arrived(Direction.BACKWARD, 0, 1)
    assert lane.next() is None, "a gradient is no input"
    lane.arrived(Direction.FORWARD, 0, 1)
    assert lane.next() == order[0] and lane.next() is None
    lane.arrived(Direction.FORWARD, 0, 2)
    held = []
    while not lane.done:
        assert lane.next() is not None
        held.append(lane.held)
    assert held == [1.5, 1.5, 0.5] and lane.peak_held == 1.5
    assert lane.next() is None


def test_the_ends_of_a_pipeline_have_inputs_of_their_own():
    first = FixedOrder([Action(Kind.F, 0, 0), Action(Kind.F, 1, 0)], Geometry(2, 0, 2, 1))
    assert first.next() is not None and first.next() is None
    last = FixedOrder([Action(Kind.B, 1, 0), Action(Kind.B, 0, 0)], Geometry(2, 1, 2, 1))
    assert last.next() is not None and last.next() is None


# Conditions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_unit_of_time_is_a_whole_ranks_forward(chunks):
    shape = Shape(3, chunks, 5)
    assert rank_forward(uniform(shape), shape) == pytest.approx(1.0)
    head = condition_costs("head", shape, 0)
    last = shape.num_stages - 1
    for kind in Kind:
        times = head.durations[kind]
        assert times[last] == [pytest.approx(1 / chunks + 0.5)] * 5
        assert times[:last] == [[1 / chunks] * 5] * last
    assert condition_costs("com10", shape, 0).hops[0].latency == pytest.approx(0.05 / chunks)


def test_unlike_microbatches_take_of_a_heavy_head_by_their_tokens():
    """All took the mean one's."""
    shape = Shape(2, 1, 2, (100, 300))
    costs = Costs(([[1.0, 3.0]] * 2, [[2.0, 6.0]] * 2, [[1.0, 3.0]] * 2), [Hop(0.0, 0.0)])
    heavy = conditions.heavy_head(0.5)(costs, shape, random.Random(0)).durations
    assert heavy[0] == [[1.0, 3.0], [1.5, 4.5]] and heavy[2] == heavy[0]


def test_conditions_draw_anew_for_each_shape_and_one_changes_nothing():
    shapes = [Shape(8, 1, m) for m in range(1, 9)]
    assert all(condition_costs("unif", shape, 0) == uniform(shape) for shape in shapes)
    slow = {
        max(range(8), key=lambda rank, costs=costs: costs.durations[Kind.F][rank][0])
        for costs in (condition_costs("str2", shape, 0) for shape in shapes)
    }
    assert len(slow) > 1


def test_one_rank_or_one_link_is_slow():
    shape = Shape(3, 2, 4)
    slow = condition_costs("str1.5", shape, 7).durations[Kind.B]
    ranks = {stage % 3 for stage in range(6) if slow[stage] == [0.75] * 4}
    assert len(ranks) == 1 and all(slow[s] == [0.5] * 4 for s in range(6) if s % 3 not in ranks)
    hops = condition_costs("lnk2", shape, 7).hops
    far = {stage % 3 for stage, hop in enumerate(hops) if hop.latency == hop.occupancy == 0.5}
    assert len(far) == 1
    assert all(hop.latency == 0.0025 for stage, hop in enumerate(hops) if stage % 3 not in far)
    chosen = conditions.slow_link(3.0, rank=1)(uniform(shape), shape, random.Random(0)).hops
    assert [hop.latency for hop in chosen] == [0.0025, 0.75, 0.0025, 0.0025, 0.75]


@pytest.mark.parametrize("name", ["jit.1", "jit.3", "len", "lnkR"])
def test_random_factors_have_a_mean_of_1(name):
    shape = Shape(2, 1, 4000)
    costs = condition_costs(name, shape, 0)
    if name == "lnkR":
        drawn = costs.hops[0].scale[0]
    else:
        drawn = costs.durations[Kind.F][0]
        same = name == "len"
        assert (costs.durations[Kind.W][1] == drawn) == same
    spread = {"jit.1": 0.1, "jit.3": 0.3, "len": 0.53, "lnkR": 1.0}[name]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.06)
    assert statistics.stdev(drawn) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("name", ["tr1", "trN"])
def test_transients_take_about_a_fifth_of_the_time_until_any_schedule_ends(name):
    shape = Shape(4, 1, 200)
    slow = condition_costs(name, shape, 0).slow_times
    horizon = 12.0 * (200 + 8)
    lost = [times.end(0.0, 1000.0) / 1000.0 - 1 for times in slow.values()]
    if name == "trN":
        assert sorted(slow) == [0, 1, 2, 3]
        assert statistics.fmean(lost) == pytest.approx(0.2 / (1 - 0.1) / 2, rel=0.35)
    else:
        assert sum(lost) == pytest.approx(0.2 / (1 - 0.1) / 2, rel=0.5)
    late = 0.999 * horizon
    assert any(times.end(late, horizon) > late + horizon + 1e-6 for times in slow.values())


# Lengths ------------------------------------------------------------------------------------------


def test_costs_of_lengths_are_in_forwards_of_the_mean_microbatch():
    costs = LengthCosts(per_square=(0.5, 1.0, 0.0))
    found = costs.of_works([(2, 4), (4, 16)], 2, 3, hop=0.5)
    mean = ((2 + 2) + (4 + 8)) / 2
    assert found.durations[Kind.F] == [[4 / mean / 3, 12 / mean / 3]] * 6
    assert found.durations[Kind.B] == [[6 / mean / 3, 20 / mean / 3]] * 6
    assert sum(map(sum, found.durations[Kind.F])) == pytest.approx(2 * 2)
    assert found.hops == [Hop(0.5 / 3 / 2, 0.5 / 3 / 2)] * 5
    square = LengthCosts.transformer(100).per_square
    assert square == pytest.approx((1 / 1200, 2.5 / 1200, 0.0))


def test_drawn_lengths_are_those_of_their_distributions():
    short, mixed, rows = (MIXES[name].draw(random.Random(0), 4000) for name in MIXES)
    assert statistics.median(map(sum, short)) == pytest.approx(1000, rel=0.06)
    assert min(short) >= (1,) and max(short) == (16384,)
    share = statistics.fmean(32768 <= each[0] <= 131072 for each in mixed)
    assert share == pytest.approx(0.1, abs=0.02)
    assert len(rows) == 4000 and all(0 < sum(row) <= 131072 for row in rows)
    following = [length[0] for length in rows[1:]]
    assert all(sum(row) + f > 131072 for row, f in zip(rows, following, strict=False))


def test_lengths_are_read():
    assert parse_lengths("1000, 8000\n2000,") == [1000, 8000, 2000]
    for text in ("", "0", "-1", "1.5", "1;2"):
        with pytest.raises(ConfigError, match="is not a list of lengths"):
            parse_lengths(text)


# Schedules ----------------------------------------------------------------------------------------


def test_a_schedule_of_one_chunk_does_the_work_of_all():
    costs = Costs(
        tuple([[float(10 * s + k)] for s in range(4)] for k in range(3)),  # type: ignore[arg-type]
        [Hop(float(s), 0.0) for s in range(3)], {1: SlowTimes([(0.0, 1.0)])}, {0: 0.5},
    )  # fmt: skip
    found = join_chunks(costs, Shape(2, 2, 1))
    assert found.durations == ([[20.0], [40.0]], [[22.0], [42.0]], [[24.0], [44.0]])
    assert found.hops == [Hop(0.0, 0.0)]
    assert found.slow_times is costs.slow_times and found.overhead == {0: 0.5}


def test_each_rank_has_the_memory_of_its_own():
    """A cap in bytes, and the share that a B frees, are of the rank's activation."""
    memory = tuple(
        Memory(activation_bytes=size, deferred_bytes=kept * size, head_room=0.0)
        for size, kept in ((10.0, 0.5), (20.0, 0.25))
    )
    lanes: Any = ScheduleConfig(memory=memory).lanes(Shape(2, 1, 6))
    lanes[0].arrived(Direction.BACKWARD, 0, 6)
    lanes[1].arrived(Direction.FORWARD, 0, 6)
    for lane, kept in zip(lanes, (0.5, 0.25), strict=True):
        before = 0.0
        while lane.next().kind is not Kind.B:
            before = lane.held
        assert lane.held == pytest.approx(before - 1 + kept)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_static_schedules_hold_microbatches_by_their_size(name):
    shape = Shape(1, 1, 3, (2, 4, 8), 16)
    found = run_static(name, shape, even_costs(1, 3))
    assert found.peak_held == [pytest.approx(14 / 16 if name == "gpipe" else 8 / 16)]
    kept = run_static("zb-h1", Shape(2, 1, 2), even_costs(2, 2))
    assert kept.peak_held == [2.0, 2.0]


def test_each_chunk_of_a_replay_has_as_many_pieces_as_it_was_recorded_with():
    order = [
        Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), Action(Kind.W, 1, 0, 0),
        Action(Kind.W, 1, 0, 1), Action(Kind.B, 0, 0), Action(Kind.W, 0, 0, 0),
    ]  # fmt: skip
    costs = even_costs(2, 1, times=(1.0, 2.0, 4.0))
    assert replay([order], costs, 2) == 2 * (1.0 + 2.0 + 4.0)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_slow_intervals_have_their_share_of_the_time(share):
    shape = Shape(2, 1, 4000)
    costs = uniform(shape)
    slowed = conditions.transient_all(2.0, share)(costs, shape, random.Random(1))
    work = 8.0 * 4000 * conditions.rank_forward(costs, shape)
    end = slowed.slow_times[0].end(0.0, work)
    assert 2 * (end - work) / end == pytest.approx(share, rel=0.1), "half of slow time is lost"
