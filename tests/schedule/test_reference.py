"""The reference order is megatron-core's own, and valid where megatron-core has none."""

import itertools
import random
import types

import pytest

from megatron.dpp.schedule import Geometry, Kind, peak_in_flight, peak_size, reference_order
from megatron.dpp.schedule.reference import padded_microbatches
from megatron.dpp.sim.conditions import uniform
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.schedules import ScheduleConfig
from tests.schedule.pipelines import with_keys

SHAPES = [
    (p, v, m, group)
    for p, v in itertools.product((2, 3, 4), (2, 3))
    for group in (p, p + 1, 2 * p)
    for m in range(group, 3 * group + 1)
    if not 0 < m % group < p
]


def megatron_order(schedules, p, rank, v, m, group):
    """Forwards and backwards as the loops of megatron-core 0.16.1 would run them, from its own
    table and counts.
    """
    link = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(size=lambda: p, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=v,
    )
    total, _, warmup, remaining = schedules.get_pp_rank_microbatches(
        m, v, group, p2p_communicator=link
    )
    table = schedules.get_schedule_table(m, v, group)
    order = [(Kind.F, c, i) for i, c in table[:warmup]]
    for k in range(remaining):
        i, c = table[k + warmup]
        order.append((Kind.F, c, i))
        i, c = table[k]
        order.append((Kind.B, v - 1 - c, i))
    return order + [(Kind.B, v - 1 - c, i) for i, c in table[remaining:total]]


def test_interleaved_order_is_megatrons():
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for p, v, m, group in SHAPES:
        for rank in range(p):
            ours = [a[:3] for a in reference_order(Geometry(p, rank, v, m, group=group))]
            assert ours == megatron_order(schedules, p, rank, v, m, group), (p, v, m, group, rank)


@pytest.mark.parametrize(
    ("geometry", "order"),
    [
        (Geometry(4, 1, 1, 4), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        (Geometry(2, 0, 2, 3, forward_only=True), "0F0 0F1 1F0 1F1 0F2 1F2"),
        (Geometry(2, 0, 1, 6, groups=(3, 3)), "0F0 0F1 0F2 0F3 0B2 0F4 0B1 0F5 0B0 0B5 0B4 0B3"),
    ],
)
def test_orders_by_hand(geometry, order):
    """1F1B, an evaluation, and two sequences of three slices."""
    assert " ".join(map(str, reference_order(geometry))) == order


def test_peaks_are_those_of_the_closed_form():
    for p, v, k in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        m = k * p
        for r in range(p):
            interleaved = min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v)
            expected = min(p - r, m) if v == 1 else interleaved
            assert peak_in_flight(Geometry(p, r, v, m)) == expected


@pytest.mark.parametrize(("num", "group", "padded"), [(2, 6, 6), (5, 6, 6), (6, 6, 6), (7, 6, 10)])
def test_fewer_microbatches_than_a_group_count_as_a_whole_one(num, group, padded):
    assert padded_microbatches(Geometry(4, 0, 2, num, group=group)) == padded
    assert padded_microbatches(Geometry(4, 0, 1, num, group=group)) == num


# Linked microbatches


def test_units_backwards_and_those_due_of_a_cut():
    geometry = Geometry(2, 0, 1, 6, groups=(3, 1, 2))
    assert geometry.backward_units == (2, 1, 0, 3, 5, 4)
    assert geometry.due == (0, 0, 0, 3, 4, 4, 6)
    assert [geometry.position(Kind.B, unit) for unit in range(6)] == [2, 1, 0, 3, 5, 4]
    assert [geometry.position(Kind.F, unit) for unit in range(6)] == list(range(6))
    assert geometry.uncut == Geometry(2, 0, 1, 3)
    cut, uncut = Geometry(2, 0, 1, 3, groups=(1, 1, 1)), Geometry(2, 0, 1, 3)
    assert cut == uncut and hash(cut) == hash(uncut) and cut.uncut is cut, "groups of one are none"


def test_the_reference_leads_by_a_group():
    """With K slices each, one chunk warms up with q + K - 1 forwards; then F and B alternate."""
    for p, v, size in itertools.product((1, 2, 4), (1, 2, 3), range(1, 10)):
        groups = (size,) * 2 * p
        for rank in range(p):
            order = reference_order(Geometry(p, rank, v, sum(groups), groups=groups))
            first = next(place for place, action in enumerate(order) if action.kind is Kind.B)
            behind, (rounds, rest) = p - 1 - rank, divmod(size - 1, p)
            more = size - 1 if v == 1 else (v - 1) * p + v * p * rounds + rest
            assert first - 1 >= min((1 + (v > 1)) * behind + more, sum(groups) * v - 1)


def test_the_least_cap_with_one_chunk_is_a_sequence_and_a_slice_per_rank_after():
    groups, sizes, kappa = (4, 4, 4), (10,) * 12, 0.1
    for rank in range(4):
        order = reference_order(Geometry(4, rank, 1, 12, groups=groups))
        peak = peak_size(order, with_keys(sizes, groups, kappa))
        assert 0 <= peak - (44 + 10 * (3 - rank)) <= 10 + 4  # up to a unit and kappa L_2


def test_a_static_order_ends_with_any_number_of_microbatches_and_slices():
    """Strictly in order with a fused backward: nothing else can unblock a wrong order."""
    rng = random.Random(0)
    for number in range(100):
        p, v = rng.randint(1, 6), rng.randint(1, 4)
        longest = 9 if number % 2 else 1
        groups = tuple(rng.randint(1, longest) for _ in range(rng.randint(1, 3 * p)))
        group = rng.choice((None, None, p + 1, 2 * p))
        shape = Shape(p, v, sum(groups), sizes=(1,) * sum(groups), groups=groups)
        plan = ScheduleConfig(policy="megatron", cap="strict", split_backward=False, group=group)
        found = plan.run(shape, uniform(shape))
        for rank, ran in enumerate(found.actions):
            geometry = Geometry(p, rank, v, sum(groups), group=group, groups=groups)
            assert ran == reference_order(geometry)
