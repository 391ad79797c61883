"""Backwards that are fused where enough others wait for their W."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.config import Backward
from megatron.dpp.errors import ReplayError
from megatron.dpp.schedule import Action, Geometry, Kind, Scheduler
from megatron.dpp.schedule.caps import default_cap
from megatron.dpp.schedule.recording import DecisionRecorder, Recording
from megatron.dpp.sim.costs import Shape, even_costs
from megatron.dpp.sim.schedules import ScheduleConfig
from tests.schedule.test_run_on import RANDOM, arrivals


@settings(max_examples=150)
@given(**RANDOM, stock=st.sampled_from([0, 1, 2, math.inf]))
def test_every_weight_gets_its_gradients_in_microbatch_order(
    p: int, v: int, m: int, pieces: list[int], stock: float, policy: str, seed: int
) -> None:
    """A backward is fused exactly if no W of its chunk waits, and at least ``stock`` others do."""
    rng = random.Random(seed)
    geometry = Geometry(p, rng.randrange(p), v, m, w_pieces=tuple(pieces[:v]))
    cap = default_cap(geometry).chunks
    scheduler = Scheduler(geometry, policy=policy, cap=cap, stock=stock)
    counts: dict[tuple[int, int], int] = {}
    waiting: list[int] = []
    added = [0] * v
    while not scheduler.done:
        for one in arrivals(scheduler, rng, counts):
            scheduler.arrived(*one)
        action = scheduler.next()
        if action is None or action.kind == Kind.F:
            continue
        chunk, last = action.chunk, action.piece == pieces[action.chunk] - 1
        if action.kind == Kind.B and pieces[chunk]:
            assert scheduler.fused == (chunk not in waiting and len(waiting) >= stock)
            waiting += [] if scheduler.fused else [chunk]
        if action.kind == Kind.B and (scheduler.fused or not pieces[chunk]):
            assert chunk not in waiting
        if (action.kind == Kind.W and last) or (action.kind == Kind.B and chunk not in waiting):
            assert action.microbatch == added[chunk]
            added[chunk] += 1
        if action.kind == Kind.W and last:
            waiting.remove(chunk)
    assert added == [m] * v and not waiting and scheduler.held == 0
    assert scheduler.peak_held <= cap


def test_no_backward_is_fused_by_default() -> None:
    scheduler = Scheduler(Geometry(1, 0, 1, 2), cap=4)
    kinds = []
    while not scheduler.done:
        action = scheduler.next()
        assert action is not None and not scheduler.fused
        kinds.append(action.kind)
    assert kinds.count(Kind.W) == 2


@pytest.mark.parametrize("word", ["on", "off", "stock:0", "stock:2"])
def test_a_backward_is_written_as_it_is_read(word: str) -> None:
    found = Backward.of(word)
    assert found is not None and str(found) == word


ALL_FUSED = "0F0 0B0 0F1 0B1"


def test_a_recording_tells_which_backwards_were_fused(tmp_path) -> None:
    path, geometry = str(tmp_path / "run"), Geometry(1, 0, 1, 2, w_pieces=(3,))
    actions = list(map(Action.parse, ALL_FUSED.split()))
    with DecisionRecorder(path, geometry) as recorder:
        recorder.write(geometry, actions, split_backward=True, stock=0)
        recorder.write(geometry, actions, split_backward=False)
        recorder.write(geometry, [], split_backward=True)
    recording = Recording.load(path, 0)
    assert list(map(recording.backward, range(4))) == [
        Backward(stock=0), Backward(split=False), Backward(), Backward(),
    ]  # fmt: skip
    replay = recording.replay(0, geometry, split_backward=True, stock=0)
    scheduler = Scheduler(geometry, policy=replay, cap=4, stock=0)
    found = [scheduler.next() for _ in actions]
    assert found == actions and scheduler.done
    for backward, why in ((Backward(), "stock was 0 and is None"), (Backward(False), "w_pieces")):
        with pytest.raises(ReplayError, match=why):
            recording.replay(0, geometry, split_backward=backward.split, stock=backward.stock)
    with pytest.raises(ReplayError, match="stock was None and is 1"):
        recording.replay(2, geometry, split_backward=True, stock=1)


def test_a_fused_backwards_output_leaves_before_its_weight_gradients() -> None:
    """Stage 1's gradient is under way while its W runs: 1 + 1 + 1 + (B and W of stage 0)."""
    shape, costs = Shape(2, 1, 1), even_costs(2, 1, times=(1.0, 1.0, 1.0), hop=0.0)
    stock = ScheduleConfig(stock=0).run(shape, costs)
    whole = ScheduleConfig(split_backward=False).run(shape, costs)
    assert (stock.makespan, whole.makespan) == (5.0, 6.0)
    assert [len(slots) for slots in stock.slots] == [2, 2]
