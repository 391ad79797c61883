"""Running on through a W: the same actions as with a decision per piece."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.schedule import Action, Geometry, Kind, MemoryLimit, Scheduler, View
from megatron.dpp.schedule.caps import default_cap

LARGEST = 12


RANDOM: dict[str, Any] = {
    "p": st.integers(1, 4),
    "v": st.integers(1, 3),
    "m": st.integers(1, 8),
    "pieces": st.lists(st.integers(0, 5), min_size=3, max_size=3),
    "policy": st.sampled_from(["dynamic", "depth-first", "megatron"]),
    "seed": st.integers(0, 1 << 20),
}
"""Strategies for a rank of a pipeline, the pieces of its chunks' W, and its policy."""


def arrivals(
    scheduler: Scheduler, rng: random.Random, counts: dict[tuple[int, int], int]
) -> list[tuple[int, int, int]]:
    """A random number of further messages on each channel of a rank."""
    geometry, view = scheduler.geometry, scheduler.view
    found = []
    for direction in (0, 1):
        for chunk in range(geometry.num_chunks):
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
    **RANDOM,
    above=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    beta=st.sampled_from([0.0, 0.4, 1.0]),
    soft=st.booleans(),
)
def test_no_decision_differs(
    p: int, v: int, m: int, pieces: list[int], policy: str, above: float, beta: float, soft: bool,
    seed: int,
) -> None:  # fmt: skip
    """Whatever arrives between two decisions, with unlike sizes, caps and soft limits."""
    rng = random.Random(seed)
    geometry = Geometry(p, rng.randrange(p), v, m, w_pieces=tuple(pieces[:v]))
    cap = default_cap(geometry).chunks + above
    limits = [MemoryLimit(cap=cap - 0.5, soft=True, unlike=True)] if soft else []
    plain, hasty = (
        Scheduler(
            geometry, policy=policy, cap=cap, beta=beta, largest=LARGEST, limits=limits,
            sizes=[random.Random(seed + i).randint(1, LARGEST) for i in range(m)],
        )
        for _ in range(2)
    )  # fmt: skip
    counts: dict[tuple[int, int], int] = {}
    ran_on, idle = 0, 0
    while not plain.done:
        for one in arrivals(plain, rng, counts):
            plain.arrived(*one)
            hasty.arrived(*one)
        action = plain.next()
        assert action == hasty.next()
        idle = 0 if action else idle + 1
        assert idle < 1000
        while action is not None and action.kind == Kind.W and rng.random() < 0.8:
            action = hasty.run_on()
            if action is None:
                break
            ran_on += 1
            assert action == plain.next()
    assert hasty.done and hasty.run_on() is None
    assert (plain.peak_held, plain.num_out_of_order) == (hasty.peak_held, hasty.num_out_of_order)


def one_w(policy: object = "dynamic", cap: float = 8) -> Scheduler:
    """A last rank with a W of three pieces, of which one has run."""
    geometry = Geometry(2, 1, 1, 4, w_pieces=(3,))
    scheduler = Scheduler(geometry, policy=policy, cap=cap)  # type: ignore[arg-type]
    scheduler.arrived(0, 0, 1)
    assert [str(scheduler.next()) for _ in range(3)] == ["0F0", "0B0", "0W0"]
    return scheduler


def test_a_w_is_run_to_its_end() -> None:
    scheduler = one_w()
    pieces = [scheduler.run_on() for _ in range(3)]
    assert [piece and piece.piece for piece in pieces] == [1, 2, None]


def test_a_forward_that_got_room_comes_first() -> None:
    """Its input was here, and a piece made the room that it waited for."""
    scheduler = one_w(cap=1)
    scheduler.arrived(0, 0, 2)
    pieces = []
    while (piece := scheduler.run_on()) is not None:
        pieces.append(piece.piece)
    assert pieces == [1, 2] and str(scheduler.next()) == "0F1"
    ready = one_w()
    ready.arrived(0, 0, 2)
    assert ready.run_on() is None and str(ready.next()) == "0F1"


def test_a_policy_of_a_user_decides_each_piece() -> None:
    asked: list[None] = []

    def mine(view: View) -> Action | None:
        asked.append(None)
        return view.first_backward() or view.first_forward() or view.weight()

    scheduler = one_w(mine)
    asked.clear()
    assert scheduler.run_on() is None and not asked


@pytest.mark.parametrize("kind", ["F", "B"])
def test_only_a_w_is_run_on(kind: str) -> None:
    scheduler = Scheduler(Geometry(2, 1, 1, 4, w_pieces=(3,)), cap=8)
    scheduler.arrived(0, 0, 1)
    while (action := scheduler.next()) is not None and action.kind.name != kind:
        pass
    assert scheduler.run_on() is None
