"""Recording and replay of decisions, and the errors of a replay that does not fit."""

import dataclasses
import json
from contextlib import closing

import pytest

from megatron.dpp.config import Backward
from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, DataError, ReplayError
from megatron.dpp.schedule import (
    Action,
    DecisionRecorder,
    Geometry,
    Recording,
    Replay,
    Scheduler,
    reference_order,
    replica_path,
)
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.conditions import condition_costs
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.schedules import ScheduleConfig
from tests.schedule.pipelines import follow

SHAPE = Shape(3, 2, 6)


def geometry(rank, num_microbatches=6, **more):
    return Geometry(3, rank, 2, num_microbatches, **more)


def test_a_run_under_jitter_is_replayed_under_other_jitter(tmp_path):
    path = str(tmp_path / "order")
    first = ScheduleConfig().run(SHAPE, condition_costs("jit.3", SHAPE, seed=1))
    for rank, actions in enumerate(first.actions):
        with closing(DecisionRecorder(path, geometry(rank))) as recorder:
            recorder.write(geometry(rank), actions, Backward())
        recorder.close()
    lanes = [
        Scheduler(
            geometry(rank),
            policy=Recording.load(path, rank).replay(0, geometry(rank), Backward()),
        )
        for rank in range(3)
    ]
    costs = condition_costs("jit.3", SHAPE, seed=2)
    again = simulate(lanes, costs, split_backward=True)
    assert again.actions == first.actions
    assert ScheduleConfig().run(SHAPE, costs).actions != first.actions


def test_a_recording_is_lines_of_json_that_other_programs_may_read(tmp_path):
    path, pieces = tmp_path / "order", Geometry(3, 1, 2, 6, w_pieces=(3, 0))
    with closing(DecisionRecorder(str(path), pieces)) as recorder:
        actions = [Action.parse("0F0"), Action.parse("0W2.1")]
        recorder.write(pieces, actions, Backward(), [5] * 6)
        recorder.write(pieces, actions[:1], Backward(False))
        recorder.write(geometry(1, 2, forward_only=True), actions[:1], Backward())
    trained = {"num_microbatches": 6, "forward_only": False}
    assert [json.loads(line) for line in (tmp_path / "order.rank1").read_text().splitlines()] == [
        {"format": "dpp-schedule", "version": 1, "num_ranks": 3, "rank": 1, "num_chunks": 2},
        {"iteration": 0, **trained, "w_pieces": [3, 0], "sizes": [5] * 6, "actions": "0F0 0W2.1"},
        {"iteration": 1, **trained, "w_pieces": [0, 0], "actions": "0F0"},
        {"iteration": 2, "num_microbatches": 2, "forward_only": True, "w_pieces": [0, 0],
         "actions": "0F0"},
    ]  # fmt: skip


def replayed(text, num_microbatches=6, cap=None):
    actions = [Action.parse(word) for word in text.split()]
    return Scheduler(Geometry(3, 0, 1, num_microbatches), policy=Replay(actions, "tape"), cap=cap)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "0F0 0F2",
            r"tape: action 2 of 2, 0F2, may not run on pipeline rank 0: 1 of 6 F of chunk 0",
        ),
        ("0F0 0F1 0F2 0F3", r"action 4 of 4, 0F3.*3 of 3 chunk activations are held"),
        ("0F0 0W0", r"action 2 of 2.*no weight gradient"),
        ("0F0 0B1", r"action 2 of 2.*0 of 6 B"),
        ("0F0 5F0", r"action 2 of 2.*chunks 0 .. 0"),
        ("0F0", r"ends after 1 actions; 0F1 is left"),
        ("0B0", r"action 1 of 1.*forward has not run"),
    ],
)
def test_a_replay_that_cannot_be_followed_says_where_and_why(text, why):
    scheduler = replayed(text, cap=3)
    with pytest.raises(ReplayError, match=why):
        for _ in range(len(text.split()) + 1):
            scheduler.next()


def sized(tmp_path, recorded, actions="0F0 0F1 0B0 0W0 0B1 0W1"):
    """A replay of two microbatches recorded with these sizes, before its first action."""
    geometry, path = Geometry(2, 0, 1, 2), str(tmp_path / "order")
    with closing(DecisionRecorder(path, geometry)) as recorder:
        words = [Action.parse(word) for word in actions.split()]
        recorder.write(geometry, words, Backward(), recorded)
    replay = Recording.load(path, 0).replay(0, geometry, Backward())
    return Scheduler(geometry, policy=replay, largest=8)


@pytest.mark.parametrize("recorded", [(3, 8), None])
def test_a_replay_needs_the_sizes_of_the_recording(tmp_path, recorded):
    sizes = recorded or (8, 8)
    same = sized(tmp_path, recorded)
    for microbatch, size in enumerate(sizes):
        assert str(same.next()) == f"0F{microbatch}"
        same.learn(microbatch, size)
    same.arrived(Direction.BACKWARD, 0, 2)
    assert [str(same.next()) for _ in range(4)] == ["0B0", "0W0", "0B1", "0W1"]
    other = sized(tmp_path, recorded)
    other.next()
    other.learn(0, 5)
    with pytest.raises(ReplayError, match=f"microbatch 0 had size {sizes[0]} and has size 5"):
        other.next()


def test_broken_sizes_are_named(tmp_path):
    with pytest.raises(DataError, match=r'"sizes" \[1\] are not those of its microbatches'):
        sized(tmp_path, (1,))


def test_a_replay_that_would_wait_for_ever_says_so():
    geometry = Geometry(2, 0, 2, 1)
    actions = [Action.parse(word) for word in ["0F0", "1F0", "0B0"]]
    scheduler = Scheduler(geometry, policy=Replay(actions, "tape"))
    scheduler.next()
    assert scheduler.next() is None
    scheduler.arrived(Direction.FORWARD, 1, 1)
    scheduler.next()
    with pytest.raises(ReplayError, match=r"0B0, may not.* cannot before 1B0 has run here"):
        scheduler.next()


@pytest.mark.parametrize("line", [{}, {"actions": 3}, {"actions": "0F0 x"}])
def test_broken_lines_are_named(tmp_path, line):
    geometry = Geometry(1, 0, 1, 1)
    path = str(tmp_path / "order")
    with closing(DecisionRecorder(path, geometry)) as recorder:
        recorder.write(geometry, [], Backward())
    recording = Recording.load(path, 0)
    recording.iterations[0].pop("actions")
    recording.iterations[0].update(line)
    with pytest.raises(DataError, match=r"order.rank0'\), iteration 0"):
        recording.replay(0, geometry, Backward())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("", "not a recording"),
        ("{}\n", "not a recording"),
        ("\x00\ufffd", "line 1: not JSON"),
        ("nonsense\n", "line 1: not JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        (json.dumps({"format": "dpp-schedule", "version": 9}) + "\n", "version 9"),
    ],
)
def test_broken_files_are_named(tmp_path, content, why):
    if content is not None:
        (tmp_path / "order.rank0").write_text(content)
    with pytest.raises(DataError, match=why):
        Recording.load(str(tmp_path / "order"), 0)


def test_what_cannot_be_written_is_named_and_what_is_written_is_there(tmp_path):
    with pytest.raises(ConfigError, match=r"record=.*nowhere.*No such file"):
        DecisionRecorder(str(tmp_path / "nowhere" / "order"), Geometry(1, 0, 1, 1))
    path = str(tmp_path / "order")
    with closing(
        DecisionRecorder(path, geometry(0))
    ) as recorder:  # a run that is killed later loses none
        for number in range(3):
            recorder.write(geometry(0), [], Backward())
            assert len(Recording.load(path, 0).iterations) == number + 1
    assert [replica_path("run", each) for each in range(2)] == ["run", "run.replica1"]


def test_a_replay_with_other_groups_or_fused_backwards_stops(tmp_path):
    path, shape = str(tmp_path / "run"), {"w_pieces": (3,)}
    cut, uncut = (Geometry(1, 0, 1, 3, groups=groups, **shape) for groups in ((2, 1), ()))
    with closing(DecisionRecorder(path, cut)) as recorder:
        for each in (cut, uncut):
            recorder.write(each, reference_order(each), Backward(False))
        recorder.write(uncut, reference_order(uncut), Backward(stock=0))
        recorder.write(uncut, [], Backward())
    recording = Recording.load(path, 0)
    found = list(map(recording.backward, range(5)))
    assert found == [Backward(False), Backward(False), Backward(stock=0), Backward(), Backward()]
    for index, each in enumerate((cut, uncut)):
        recording.replay(index, each, Backward(False))
    replay = recording.replay(2, uncut, Backward(stock=0))
    scheduler = Scheduler(uncut, policy=replay, cap=4, stock=0)
    follow(scheduler, "0F0 0B0 0F1 0B1 0F2 0B2")
    assert scheduler.done
    other = Geometry(1, 0, 1, 3, groups=(1, 2), **shape)
    for index, each, backward, why in (
        (0, other, Backward(False), r"groups was \[2, 1\] and is \[1, 2\]"),
        (0, uncut, Backward(False), r"groups was \[2, 1\] and is None"),
        (1, cut, Backward(False), r"groups was None and is \[2, 1\]"),
        (2, uncut, Backward(), "stock was 0 and is None"),
        (2, uncut, Backward(False), "w_pieces"),
        (3, uncut, Backward(stock=1), "stock was None and is 1"),
        (3, Geometry(1, 0, 1, 2, **shape), Backward(), "num_microbatches was 3 and is 2"),
        (3, dataclasses.replace(uncut, forward_only=True), Backward(), "forward_only was False"),
        (4, uncut, Backward(), "replay=.*holds 4 iterations"),
    ):
        with pytest.raises(ReplayError, match=why):
            recording.replay(index, each, backward)
