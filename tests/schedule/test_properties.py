"""Whatever the times, arrivals, sizes and choices: no deadlock, order in chunks, memory below caps.

The ranks are stepped by hand, without a clock: hypothesis decides who is asked next, which message
is delivered, and which of the tasks that may run is taken.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule import (
    BUILT_IN,
    HOLDS_ALL,
    Budget,
    Geometry,
    Kind,
    MemoryLimit,
    Scheduler,
    parse_cap,
)
from tests.schedule.pipelines import Pipeline, Walk, wild

POLICIES = ["wild", *sorted({*BUILT_IN} - HOLDS_ALL)]
CUTS = [
    cut for number in (2, 3) for cut in itertools.product((1, 2, 3), repeat=number) if max(cut) > 1
]


@st.composite
def pipelines(draw: Any) -> tuple[Pipeline, random.Random]:
    """Any shape, sizes, limits, groups, pieces and policy, at the least cap."""
    rng = draw(st.randoms(use_true_random=False))
    p, v = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    m = draw(st.integers(1, 9))
    policy, kind = draw(st.sampled_from(POLICIES)), draw(st.sampled_from(["even", "sized", "cut"]))
    more: dict[str, Any] = {
        "policy": wild(rng) if policy == "wild" else policy,
        "split": draw(st.booleans()),
        "pieces": tuple(draw(st.integers(0, 3)) for _ in range(v)),
        "beta": draw(st.floats(0, 1)),
    }
    if kind == "even":
        more["cap"] = draw(st.sampled_from(["strict", "megatron", "auto"]))
    if kind == "sized":
        weighted = st.lists(st.floats(0, 4), min_size=v, max_size=v)
        more["know"] = draw(st.sampled_from(["start", "arrival", "forward"]))
        more["weights"] = draw(st.one_of(st.just([]), weighted))
        more["heads"] = draw(st.booleans())
        more["target"] = draw(st.one_of(st.none(), st.integers(0, 200)))
    if kind == "cut":
        more["groups"] = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        more["kappa"] = draw(st.sampled_from([0.0, 0.09, 0.35]))
        m = sum(more["groups"])
    if kind != "even":
        more["sizes"] = [rng.randint(1, 40) for _ in range(m)]
    return Pipeline(p, v, m, **more), rng


@settings(max_examples=180)
@given(pipelines())
def test_any_choice_at_any_time_ends(drawn: tuple[Pipeline, random.Random]) -> None:
    pipeline, rng = drawn
    pipeline.finish(rng)


def adversary(seed: int) -> None:
    """Forwards as early as they may run and random delays, at the least cap."""
    rng = random.Random(seed)
    p, v = rng.randint(2, 8), rng.randint(1, 3)
    groups = [rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(2, 6))]
    sizes = [rng.choice((1, 3, 10)) for _ in range(sum(groups))]
    policy, kappa = wild(rng, forwards_first=True), rng.choice((0.0, 0.2))
    groups = groups if seed % 2 else []
    Pipeline(p, v, len(sizes), sizes=sizes, groups=groups, kappa=kappa, policy=policy).finish(rng)


def test_without_the_walk_some_pipelines_get_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    for seed in range(60):
        adversary(seed)

    def fits(self: Any, place: int, after: Sequence[int]) -> bool:
        return bool(self.in_flight + self.kept + self._steps[place] <= self.limit)

    monkeypatch.setattr(Budget, "fits", fits)
    stuck = 0
    for seed in range(60):
        try:
            adversary(seed)
        except (AssertionError, ScheduleError):
            stuck += 1
    assert stuck > 10


def sizes_of(groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Two draws."""
    rng = random.Random(str(groups))
    return [tuple(rng.choice((1, 2, 4)) for _ in range(sum(groups))) for _ in range(2)]


def test_every_state_of_small_pipelines() -> None:
    """All orders of messages and tasks with sizes 1 and 3 at the least cap: none is stuck."""
    total = 0
    for p, v, m in ((2, 1, 4), (2, 2, 2), (2, 2, 3), (2, 2, 4), (3, 1, 4), (3, 2, 3), (2, 3, 3)):
        for sizes in itertools.product((1, 3), repeat=m):
            total += Walk(p, v, sizes).count()
    assert total > 10_000


@pytest.mark.parametrize("weights", [(1, 4), (2.5, 1), (0, 1)])
@pytest.mark.parametrize("heads", [False, True])
def test_every_state_with_chunks_of_unlike_weight(weights: tuple[float, ...], heads: bool) -> None:
    """One budget in bytes, or another of the LM head beside it."""
    every = [sizes for m in (2, 3) for sizes in itertools.product((1, 3), repeat=m)]
    assert sum(Walk(2, 2, each, weights=weights, heads=heads).count() for each in every) > 400


@pytest.mark.parametrize("split", [False, True])
def test_every_state_of_small_cuts(split: bool) -> None:
    total = 0
    for p, v, cuts in ((2, 1, CUTS), (3, 1, CUTS[:8]), (2, 2, CUTS[:4])):
        for groups in cuts:
            total += Walk(p, v, sizes_of(groups)[0], groups=groups, split=split).count()
    assert total > 4_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("p", "v"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_every_state_of_all_small_cuts(p: int, v: int, split: bool) -> None:
    for cut in CUTS:
        for sizes in sizes_of(cut):
            Walk(p, v, sizes, groups=cut, split=split).count(100_000)


@settings(max_examples=60)
@given(data=st.data())
def test_a_wanted_message_allows_a_task_at_once_and_something_is_always_wanted(data: Any) -> None:
    """A task may therefore be launched ahead of any wanted message, and a rank that may run nothing
    waits for one of them.
    """
    p, v = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    m, rank = data.draw(st.integers(1, 6)), data.draw(st.integers(0, p - 1))
    split = data.draw(st.booleans())
    geometry = Geometry(p, rank, v, m, w_pieces=(2,) * v if split else None)
    cap = parse_cap(data.draw(st.sampled_from(["auto", "strict", "megatron", "2p"])), geometry)
    policy = data.draw(st.sampled_from(["dynamic", "depth-first"]))
    scheduler = Scheduler(geometry, policy=policy, cap=cap.chunks, split_backward=split)
    arrived: dict[tuple[Direction, int], int] = {}
    inside = {(Direction.FORWARD, 0)} if geometry.is_first else set()
    inside |= {(Direction.BACKWARD, v - 1)} if geometry.is_last else set()
    while not scheduler.done:
        if scheduler.next() is not None:
            continue
        wanted = [channel for channel in scheduler.wanted() if channel not in inside]
        channel = data.draw(st.sampled_from(wanted))
        arrived[channel] = arrived.get(channel, 0) + 1
        scheduler.arrived(*channel, arrived[channel])
        assert scheduler.next() is not None


# A rank alone, under random arrivals

LARGEST = 12
ALONE: dict[str, Any] = {
    "p": st.integers(1, 4),
    "v": st.integers(1, 3),
    "m": st.integers(1, 8),
    "pieces": st.lists(st.integers(0, 5), min_size=3, max_size=3),
    "policy": st.sampled_from(["dynamic", "depth-first", "megatron", "eager"]),
    "seed": st.integers(0, 1 << 20),
}


def arrivals(
    scheduler: Scheduler, rng: random.Random, counts: dict[tuple[int, int], int]
) -> list[tuple[int, int, int]]:
    """A random number of further messages on each channel of a rank."""
    geometry, view, found = scheduler.geometry, scheduler, []
    for direction, chunk in itertools.product((0, 1), range(geometry.num_chunks)):
        first = direction == 0 and chunk == 0 and geometry.is_first
        last = direction == 1 and chunk == geometry.num_chunks - 1 and geometry.is_last
        if first or last or rng.random() < 0.6:
            continue
        most = view.forwards_run[chunk] if direction else geometry.num_microbatches
        now = counts.get((direction, chunk), 0)
        total = min(most, now + rng.randint(0, 3))
        if total > now:
            counts[direction, chunk] = total
            found.append((direction, chunk, total))
    return found


@settings(max_examples=150)
@given(
    **ALONE, above=st.sampled_from([0.0, 0.5, 1.0, 3.0]), beta=st.sampled_from([0.0, 0.4, 1.0]),
    soft=st.booleans(),
)  # fmt: skip
def test_running_on_through_a_w_decides_as_before_each_piece(
    p: int, v: int, m: int, pieces: list[int], policy: str, above: float, beta: float, soft: bool,
    seed: int,
) -> None:  # fmt: skip
    """Whatever arrives between two decisions, with unlike sizes, caps and soft limits."""
    rng = random.Random(seed)
    geometry = Geometry(p, rng.randrange(p), v, m, w_pieces=tuple(pieces[:v]))
    cap = parse_cap("auto", geometry).chunks + above
    limits = [MemoryLimit(cap=cap - 0.5, soft=True, unlike=True)] if soft else []
    plain, hasty = (
        Scheduler(
            geometry, policy=policy, cap=cap, beta=beta, largest=LARGEST, limits=limits,
            sizes=[random.Random(seed + i).randint(1, LARGEST) for i in range(m)],
        )
        for _ in range(2)
    )  # fmt: skip
    counts: dict[tuple[int, int], int] = {}
    idle = 0
    while not plain.done:
        for one in arrivals(plain, rng, counts):
            plain.arrived(*one)
            hasty.arrived(*one)
        action = plain.next()
        assert action == hasty.next()
        idle = 0 if action else idle + 1
        assert idle < 1000
        while action is not None and action.kind is Kind.W and rng.random() < 0.8:
            action = hasty.run_on()
            if action is None:
                break
            assert action == plain.next()
    assert hasty.done and hasty.run_on() is None
    assert (plain.peak_held, plain.num_out_of_order) == (hasty.peak_held, hasty.num_out_of_order)


@settings(max_examples=150)
@given(**ALONE, stock=st.sampled_from([0, 1, 2, math.inf]))
def test_every_weight_gets_its_gradients_in_microbatch_order(
    p: int, v: int, m: int, pieces: list[int], stock: float, policy: str, seed: int
) -> None:
    """A backward is fused exactly if no W of its chunk waits, and at least ``stock`` others do."""
    rng = random.Random(seed)
    geometry = Geometry(p, rng.randrange(p), v, m, w_pieces=tuple(pieces[:v]))
    cap = parse_cap("auto", geometry).chunks
    scheduler = Scheduler(geometry, policy=policy, cap=cap, stock=stock)
    counts: dict[tuple[int, int], int] = {}
    waiting: list[int] = []
    added = [0] * v
    while not scheduler.done:
        for one in arrivals(scheduler, rng, counts):
            scheduler.arrived(*one)
        action = scheduler.next()
        if action is None or action.kind is Kind.F:
            continue
        chunk, last = action.chunk, action.piece == pieces[action.chunk] - 1
        if action.kind is Kind.B and pieces[chunk]:
            assert scheduler.fused == (chunk not in waiting and len(waiting) >= stock)
            waiting += [] if scheduler.fused else [chunk]
        if action.kind is Kind.B and (scheduler.fused or not pieces[chunk]):
            assert chunk not in waiting
        if (action.kind is Kind.W and last) or (action.kind is Kind.B and chunk not in waiting):
            assert action.microbatch == added[chunk]
            added[chunk] += 1
        if action.kind is Kind.W and last:
            waiting.remove(chunk)
    assert added == [m] * v and not waiting and scheduler.held == 0
    assert scheduler.peak_held <= cap
