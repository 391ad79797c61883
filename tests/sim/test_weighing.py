"""The choice of ``--dpp-slice-tokens auto`` between whole sequences and slices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp.sim.batches import BatchPlans, BatchSettings
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.orders import OrderPlanner, Question, plan_batch
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.sim.slices import Row, cut
from megatron.dpp.sim.weighing import (
    MARGIN,
    MOST_TASKS,
    NO_ROOM,
    weigh,
    weigh_fixed,
    weigh_rows,
    with_overheads,
)

COSTS = LengthCosts.transformer()


def model(num_ranks: int = 4, num_chunks: int = 1, **more: Any) -> PipelineModel:
    return PipelineModel(
        num_ranks=num_ranks, num_chunks=num_chunks, policy="auto", costs=COSTS,
        **{"longest": 1 << 17} | more,
    )  # fmt: skip


WAYS = {0: [[9000]] * 2, 4096: cut([9000] * 2, 4096, COSTS), 2048: cut([9000] * 2, 2048, COSTS)}


@pytest.mark.parametrize(
    ("coarse", "fine", "tokens"),
    [(0.95, 0.91, 0), (0.95, 0.89, 2048), (0.8, 0.85, 4096), (1.1, 1.2, 0), (0.8, 0.8, 4096)],
)
def test_slices_must_gain_ten_per_cent(coarse: float, fine: float, tokens: int) -> None:
    times = {1: 2.0, 3: 2.0 * coarse, 5: 2.0 * fine}  # by the units of a row

    def time(rows: Any) -> float:
        return times[1 if isinstance(rows[0], list) else len(rows[0].ends)]

    found = weigh(WAYS, model(), time, lambda _: 0.0)
    assert found.tokens == tokens
    assert found.times == pytest.approx({0: 1.0, 4096: coarse, 2048: fine})
    best = min(coarse, fine)
    assert f"{best:.3f} of the time of whole" in found.text and f"{1 - MARGIN:.2f}" in found.text


@pytest.mark.parametrize(
    ("p", "v", "head"), [(2, 1, 0.0), (2, 2, 0.0), (4, 1, 0.0), (4, 2, 0.0), (2, 1, 0.5)]
)
def test_bounds_leave_out_only_what_would_not_be_chosen(p: int, v: int, head: float) -> None:
    """The choice and its figures are those of simulating every way."""
    pruned = 0
    few = itertools.product((2, 4), ("auto", "0.6seq", "megatron"))
    for length, (number, cap) in itertools.product((6500, 20000), [*few, (30, "auto")]):
        one = with_overheads(model(p, v, cap=cap, head=head))
        rows = [number * [length], number * [length] + 5 * [400], [length, *number * [500]]]
        for lengths in rows:
            ways: dict[int, Any] = {tokens: cut(lengths, tokens, COSTS) for tokens in (4096, 2048)}
            ways = {0: [[each] for each in lengths]} | ways
            found, every = weigh(ways, one), weigh(ways, one, least=lambda _: 0.0)
            assert (found.tokens, found.why) == (every.tokens, every.why)
            assert found.times.items() <= every.times.items()
            for tokens, time in every.times.items():
                base = one.seconds(ways[0]) if 0 in every.times else one.seconds(ways[every.tokens])
                least = one.least_seconds(ways[tokens]) / base
                assert least <= time * (1 + 1e-9) and (
                    not tokens or found.least <= time * (1 + 1e-9)
                )
            pruned += len(every.times) - len(found.times)
            if not found.times.keys() - {0}:
                assert f"takes at least {found.least:.3f} of the time" in found.text
    assert pruned


def test_whole_sequences_that_memory_does_not_hold_are_cut() -> None:
    """A cap below what they need, or no whole sequences to weigh."""
    small = model(cap="0.5seq")
    with pytest.raises(ConfigError):
        small.seconds(WAYS[0])
    for ways, one in ((WAYS, small), ({t: WAYS[t] for t in (4096, 2048)}, model())):
        found = weigh(ways, one)
        assert found.tokens in (4096, 2048) and found.text.endswith(NO_ROOM)


def test_the_finest_slices_are_left_out_where_all_have_too_many_tasks() -> None:
    calls: list[int] = []

    def time(rows: Any) -> float:
        calls.append(len(rows))
        return 1.0

    per_unit = 3 * 4 * 2
    whole = MOST_TASKS // per_unit // 5
    ways = {0: [[9000]] * whole, 4096: WAYS[4096] * (whole // 2), 2048: WAYS[2048] * whole}
    found = weigh(ways, model(num_chunks=2), time, lambda _: 0.0)
    assert found.tokens == 0 and calls == [whole, 2 * (whole // 2)]
    calls.clear()
    found = weigh(ways, model(num_chunks=8), time)
    assert found.tokens == 0 and not calls and "50000 tasks" in found.text
    assert weigh({4096: ways[4096] * 9, 2048: ways[2048] * 9}, model(), time).tokens == 4096


def test_long_sequences_of_few_microbatches_are_cut_and_short_or_many_are_not() -> None:
    assert weigh_fixed(model(), 16384, 8).tokens in (2048, 4096)
    assert weigh_fixed(model(), 4096, 64).tokens == 0
    many = weigh_fixed(model(), 16384, 64)
    assert many.tokens == 0 and 0.95 < min(many.times.values()) <= 1.0
    assert weigh_fixed(model(), 3000, 8).text == (
        "whole sequences, as no sequence has more than 1.5 slices"
    )
    assert weigh_fixed(model(1), 16384, 8).tokens == 0, "one rank waits for none"
    needed = weigh_fixed(model(), 16384, 64, needed="why not")
    assert needed.tokens in (2048, 4096) and needed.text.endswith("tokens, as why not")


@pytest.mark.parametrize(("p", "v", "number", "tokens"), [(4, 1, 32, 0), (4, 2, 20, 0)])
def test_further_microbatches_wait_as_those_that_are_simulated(
    p: int, v: int, number: int, tokens: int
) -> None:
    """They took a rank's own work: slices of heavy attention, which wait, seemed to gain."""
    length = 8192 if v == 1 else 16384
    one = dataclasses.replace(model(p, v, longest=length), costs=LengthCosts.transformer(1024))
    rows = weigh_rows(one, ((length,),) * number)
    assert rows.tokens == weigh_fixed(one, length, number).tokens == tokens


def test_a_choice_changes_as_the_head_grows() -> None:
    """The last rank's own work grows, of which slices save nothing."""
    found = [weigh_fixed(model(2, head=head), 65536, 3) for head in (0.0, 0.25, 1.0)]
    assert [each.tokens for each in found] == [2048, 4096, 0]
    best = [min(each.times.values()) for each in found]
    assert best == sorted(best)


def test_without_a_head_times_and_choices_are_those_of_equal_ranks() -> None:
    """To the last bit: they were simulated before a model could have a head."""
    for head in ({}, {"head": 0.0}):
        one, rows = model(2, 2, **head), cut([9000, 700, 16384], 4096, COSTS)
        assert one.seconds([[9000], [700], [16384]]) == 130439.71122721356
        assert one.least_seconds([[9000], [700], [16384]]) == 103579.70398708768
        assert with_overheads(one).seconds(rows) == 112663.25902994807
        assert with_overheads(one).busy_seconds(rows) == 105299.30069661456
        assert weigh_fixed(model(2, **head), 65536, 3).times == {
            0: 1.0, 4096: 0.8571778115730335, 2048: 0.8496670456085367,
        }  # fmt: skip


@pytest.mark.timeout(60)
def test_the_planners_process_knows_the_head() -> None:
    rows = {0: [[65536]] * 3, 4096: cut([65536] * 3, 4096, COSTS)}
    question, chosen = Question(rows, {}, "drawn", weighs=True), []
    for head in (0.0, 1.0):
        with contextlib.closing(OrderPlanner(model(2, head=head))) as planner:
            found = planner.take(0, question)
        assert found == plan_batch(model(2, head=head), question)
        chosen.append(found.choice.tokens if found.choice else None)
    assert chosen == [4096, 0]


def test_costs_of_tasks_that_were_measured_count() -> None:
    """If a task takes long beside its tokens, slices must be larger, or lose."""
    slow = LengthCosts(fixed=2000.0, per_square=COSTS.per_square)
    found = weigh_fixed(dataclasses.replace(model(), costs=slow), 1 << 17, 8)
    assert min(tokens for tokens in found.times if tokens) >= 2000 / 0.03
    rows = weigh_fixed(model(), 16384, 8, rows=4)
    assert rows.times[2048] < weigh_fixed(model(), 16384, 8).times[2048], "tasks are longer"


LONG = [40000, 700, 1500, 300, 9000, 650, 400, 2100, 80, 1200, 5000, 900, 350, 610, 7000, 260]


def plans_of(lengths: list[int], replica: int = 0, **more: Any) -> BatchPlans:
    settings = BatchSettings(num_ranks=4, costs=COSTS, slices=0, **more)
    planner = OrderPlanner(model())
    return BatchPlans(lambda a, b: lengths[a:b], 16, replica, settings, planner)


@pytest.mark.timeout(120)
def test_each_batch_is_weighed_and_all_replicas_choose_alike() -> None:
    """A batch of short sequences runs as without slices."""
    lengths = LONG + [500] * 16
    replicas = [plans_of(lengths, replica, num_replicas=2) for replica in range(2)]
    for plans in replicas:
        with contextlib.closing(plans):
            assert plans.slice_tokens(0) in (2048, 4096)
            chosen = plans.choice(0)
            assert chosen is not None and chosen.times[plans.slice_tokens(0)] <= 1 - MARGIN
            assert plans.slice_tokens(16) == 0
            short = plans.choice(16)
            assert short is not None and "no sequence has more than 1.5" in short.text
            drawn = [each for (each,) in plans.microbatches(16)]
            assert drawn == sorted(drawn) and len(drawn) == 8
    assert replicas[0].choice(0) == replicas[1].choice(0)
    ends = [row[-1] for plans in replicas for row in plans.slice_ends(0)]
    assert sum(ends) == sum(LONG), "every token runs once"


@pytest.mark.timeout(120)
def test_the_planner_orders_rows_of_slices() -> None:
    times, rows = [], []
    for order in ("drawn", "planned"):
        with contextlib.closing(plans_of(LONG, order=order)) as plans:
            given = zip(plans.own_lengths(0), plans.slice_ends(0), strict=True)
            own = [Row((0,), tuple(lengths), ends) for lengths, ends in given]
            times.append(with_overheads(model()).seconds(own, plans.policy(0)))
            rows.append(sorted(own, key=str))
    assert rows[0] == rows[1] and max(len(row.ends) for row in rows[0]) > 9
    assert times[1] <= times[0]


def test_a_question_without_a_choice_keeps_the_named_order() -> None:
    rows = WAYS[2048]
    for named, order in (("drawn", [0, 1]), ("ascending", [0, 1])):
        found = plan_batch(model(), Question({2048: rows}, {}, named))
        assert (found.order, found.name, found.choice) == (order, named, None)
