"""The schedulers that a run has for its calls: policy, memory, and the cap of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.schedule import (
    BUILT_IN,
    HOLDS_ALL,
    UNIT,
    Action,
    DecisionRecorder,
    Geometry,
    Memory,
    Recording,
    Scheduler,
    parse_cap,
    peak_size,
    reference_order,
    replica_path,
)
from megatron.dpp.schedule.reference import static_peak

SPLIT, FUSED = Backward(), Backward(split=False)
TRAINING = Geometry(2, 0, 1, 4)


def decisions(**config: object) -> Decisions:
    return Decisions(DppConfig(**config), lambda _: None)  # type: ignore[arg-type]


def held_after(scheduler: Scheduler, *tasks: str) -> list[float]:
    held = []
    for task in tasks:
        scheduler.run(Action.parse(task))
        held.append(scheduler.held)
    return held


def test_each_call_has_the_policy_that_it_asks_for() -> None:
    """Its scheduler is kept, but not for a call with another policy."""
    made = decisions(policy="dynamic")
    for asked, policy in ((None, "dynamic"), ("megatron", "megatron"), (None, "dynamic")):
        assert made.scheduler(TRAINING, backward=FUSED, policy=asked).policy is BUILT_IN[policy]


def test_a_head_takes_less_of_larger_slots() -> None:
    made, last = decisions(activation_cap="megatron"), Geometry(4, 3, 1, 8)
    made.measured(Memory(activation_bytes=100, deferred_bytes=0, head_room=2.0))
    made.scheduler(last, backward=SPLIT)
    assert made.cap == 2
    made.measured_slots(200)
    made.scheduler(last, backward=SPLIT)
    assert made.cap == 3


@pytest.mark.parametrize("policy", BUILT_IN)
def test_only_a_policy_that_holds_all_waits_for_a_cap_in_bytes(policy: str) -> None:
    """Until the first step has measured activations; the others run from the start."""
    made = decisions(policy=policy, activation_cap="1GiB")
    counted = decisions(policy=policy, activation_cap="100p")
    assert counted.scheduler(TRAINING, backward=FUSED).policy is BUILT_IN[policy]
    first = "depth-first" if policy in HOLDS_ALL else policy
    assert made.scheduler(TRAINING, backward=FUSED).policy is BUILT_IN[first]
    made.measured(Memory(activation_bytes=1 << 20, deferred_bytes=0))
    assert made.scheduler(TRAINING, backward=FUSED).policy is BUILT_IN[policy]


@pytest.mark.parametrize("policy", ["megatron", "breadth-first"])
def test_an_evaluation_runs_depth_first_whatever_the_policy(policy: str) -> None:
    """If the call asks for no order: a waiting policy takes longer, and there is no cap to keep."""
    evaluation = Geometry(2, 0, 2, 4, forward_only=True)
    made = decisions(policy=policy)
    for asked, expected in ((None, "depth-first"), ("megatron", "megatron")):
        found = made.scheduler(evaluation, backward=FUSED, policy=asked)
        assert found.policy is BUILT_IN[expected]


def test_a_replayed_evaluation_runs_in_the_recorded_order(tmp_path: Path) -> None:
    path, evaluation = str(tmp_path / "order"), Geometry(2, 0, 2, 2, forward_only=True)
    order, usual = ["0F0", "1F0", "0F1", "1F1"], ["0F0", "0F1", "1F0", "1F1"]
    recorder = DecisionRecorder(replica_path(path, 0), evaluation)
    recorder.write(evaluation, list(map(Action.parse, order)), FUSED)
    recorder.close()
    for settings, expected in (({"replay": path}, order), ({}, usual)):
        scheduler = decisions(**settings).scheduler(evaluation, backward=FUSED)
        scheduler.arrived(Direction.FORWARD, 1, 2)
        found = [scheduler.next() for _ in order]
        assert list(map(str, found)) == expected


@pytest.mark.parametrize("announced", [True, False])
def test_the_static_peak_of_the_last_rank_is_that_with_its_head(announced: bool) -> None:
    """Megatron's order holds the head's logits as well; a cap without them would hold less. Sizes
    that are not announced are known once they have run.
    """
    last = Geometry(4, 3, 2, 16)
    caps = []
    for room in (0.0, 20.0):
        made = decisions(activation_cap="static")
        made.measured(Memory(activation_bytes=8, deferred_bytes=8, head_room=room, last_layers=1.0))
        for _ in range(1 if announced else 2):
            scheduler = made.scheduler(
                last, backward=SPLIT, sizes=[UNIT] * 16 if announced else None
            )
            cap = scheduler.limits[-1].cap
            made.ran(scheduler, [], backward=SPLIT)
        caps.append(cap)
        weights = scheduler.weights or (1.0, 1.0)
        expected = max(
            static_peak(last, [1] * 16), peak_size(reference_order(last), [1] * 16, weights)
        )
        assert cap == expected
    assert caps[1] > caps[0]


def test_the_head_takes_room_beside_deferred_weight_gradients_alone() -> None:
    """With a fused backward its logits are gone before another microbatch runs."""
    last = Geometry(4, 3, 2, 16)
    whole = parse_cap("auto", last).chunks
    made = decisions()
    assert made.scheduler(last, backward=FUSED).cap == made.cap == whole
    assert made.scheduler(last, backward=SPLIT).cap == made.cap < whole


def test_a_slot_is_held_until_the_last_weight_gradient_has_run() -> None:
    made = decisions()
    made.measured(Memory(activation_bytes=100, deferred_bytes=60))
    made.measured_slots(400)
    scheduler = made.scheduler(Geometry(1, 0, 1, 4, w_pieces=(1,)), backward=SPLIT)
    assert held_after(scheduler, "0F0", "0B0", "0W0") == [1.0, 1.0, 0.0]


def test_a_cap_is_said_once_however_many_calls_have_it() -> None:
    said: list[str] = []
    made = Decisions(DppConfig(activation_cap="1p"), said.append)
    for _ in range(2):
        made.scheduler(TRAINING, backward=SPLIT)
        made.renew()
    assert [line for line in said if "may hold" in line] == said[:1] == said
    assert "LM head" not in said[0], "nothing is taken off the cap"


def test_sizes_are_recorded_of_training_calls_with_unlike_microbatches(tmp_path: Path) -> None:
    path = str(tmp_path / "order")
    made = decisions(record=path)
    evaluation = Geometry(2, 0, 1, 4, forward_only=True)
    for geometry, sizes in ((TRAINING, [2, 5, 3, 5]), (TRAINING, [5] * 4), (evaluation, [2] * 4)):
        scheduler = made.scheduler(geometry, backward=SPLIT, largest=5, sizes=sizes)
        made.ran(scheduler, [], backward=SPLIT)
    made.close()
    found = [line.get("sizes") for line in Recording.load(path, 0).iterations]
    assert found == [[2, 5, 3, 5], None, None]


def test_a_replay_finds_the_way_of_each_recorded_step_evaluations_counted(tmp_path: Path) -> None:
    """Only the leader of a stage has a recording."""
    path = str(tmp_path / "order")
    evaluation = Geometry(2, 0, 1, 4, forward_only=True)
    for field in ("record", "replay"):
        made = decisions(**{field: path})
        for way in (SPLIT, FUSED, None, Backward(stock=1.0), SPLIT):
            if way is not None:
                assert made.recorded_backward(0) == (way if field == "replay" else None)
            geometry, backward = (evaluation, FUSED) if way is None else (TRAINING, way)
            scheduler = made.scheduler(geometry, backward=backward)
            made.ran(scheduler, [], backward=backward)
        made.close()
    follower = Decisions(DppConfig(replay=path), print, decides=False)
    assert follower.recorded_backward(0) is None


def test_an_evaluation_raises_no_static_cap() -> None:
    """The static schedule holds no activations there."""
    made = decisions(activation_cap="static")
    caps = []
    evaluation = Geometry(2, 0, 1, 9, forward_only=True)
    for geometry in (TRAINING, evaluation, evaluation, TRAINING):
        scheduler = made.scheduler(geometry, backward=SPLIT, largest=10, sizes=[5] * 4 + [10] * 5
                                   if geometry.forward_only else [5] * 4)  # fmt: skip
        made.ran(scheduler, [], backward=SPLIT)
        caps.append([limit.cap for limit in scheduler.limits])
    assert caps == [[1.0], [], [], [1.0]]


def test_the_last_chunk_is_held_with_its_head_once_that_is_measured() -> None:
    last = Geometry(4, 3, 2, 16)
    made = decisions()
    assert made.scheduler(last, backward=SPLIT).weights == ()
    made.measured(Memory(activation_bytes=8, deferred_bytes=8, head_room=2.0, last_layers=0.5))
    scheduler = made.scheduler(last, backward=SPLIT)
    assert scheduler.weights == (1.0, 2.5)
    for chunk in range(2):
        scheduler.arrived(0, chunk, 1)
    assert held_after(scheduler, "0F0", "1F0") == [1.0, 3.5]


def test_of_the_shapes_of_calls_those_used_last_are_kept() -> None:
    made = decisions()

    def scheduler(number: int) -> Scheduler:
        return made.scheduler(Geometry(2, 0, 1, number), backward=FUSED)

    first, second = scheduler(1), scheduler(2)
    assert [scheduler(number) for number in (3, 4)] and scheduler(1) is first
    scheduler(5)
    assert scheduler(1) is first and scheduler(2) is not second


# Measurements and announcements


def test_measured_memory_is_logged_in_mebibytes() -> None:
    said: list[str] = []
    made = Decisions(DppConfig(), said.append)
    made.measured(Memory(activation_bytes=7 << 19, deferred_bytes=3 << 19))
    assert "an activation takes 3.5 MiB" in said[0] and "keeps 1.5 MiB" in said[0]
    made.measured(Memory(activation_bytes=0, deferred_bytes=0))
    assert len(said) == 1, "nothing was measured"


def test_schedulers_are_built_anew_with_what_was_measured() -> None:
    """A scheduler that is kept would go on with the beta of the first step."""
    made = decisions()
    geometry = Geometry(2, 0, 1, 4, w_pieces=(2,))
    first = made.scheduler(geometry, backward=SPLIT)
    assert made.scheduler(geometry, backward=SPLIT) is first
    made.measured(Memory(activation_bytes=100, deferred_bytes=60))
    second = made.scheduler(geometry, backward=SPLIT)
    assert second is not first and made.scheduler(geometry, backward=SPLIT) is second
    for scheduler, share in ((first, 1.0), (second, 0.6)):
        scheduler.arrived(Direction.BACKWARD, 0, 1)
        scheduler.run(Action.parse("0F0"))
        assert held_after(scheduler, "0B0") == [pytest.approx(share)]


def test_a_call_with_shorter_sequences_has_a_scheduler_of_its_own() -> None:
    made, geometry = decisions(), Geometry(2, 0, 1, 4)
    for largest in (8, 4, 8):
        assert made.scheduler(geometry, backward=FUSED, largest=largest).sizes.largest == largest


def test_the_head_is_counted_in_slots_once_their_size_is_known() -> None:
    """Its logits are as many bytes as before, and a slot holds more than an eager activation."""
    geometry = Geometry(4, 3, 2, 16)
    made = decisions()
    made.measured(Memory(activation_bytes=100, deferred_bytes=60, head_room=8.0))
    made.measured_slots(400)
    assert made.activation_bytes == 400
    caps = [made.scheduler(geometry, backward=SPLIT).cap]
    for room in (2.0, 8.0):
        other = decisions()
        other.measured(Memory(activation_bytes=400, deferred_bytes=400, head_room=room, slots=True))
        caps.append(other.scheduler(geometry, backward=SPLIT).cap)
    assert caps[0] == caps[1] > caps[2]


def test_the_cap_is_that_of_the_last_training_step() -> None:
    made = decisions()
    assert made.cap == 0.0
    for number, (forward_only, cap) in enumerate([(True, 0.0), (False, 3.0), (True, 3.0)], 3):
        geometry = Geometry(2, 0, 1, number, forward_only=forward_only)
        made.scheduler(geometry, backward=FUSED)
        assert made.cap == cap


def test_a_scheduler_that_is_kept_follows_the_static_peak_of_the_batches() -> None:
    made = decisions(activation_cap="static")
    geometry, caps = Geometry(2, 0, 1, 4), []
    for size in (1, 10, 1):
        scheduler = made.scheduler(geometry, backward=SPLIT, largest=10, sizes=[size] * 4)
        caps.append(scheduler.limits[-1].cap)
    assert caps == [pytest.approx(0.2), 2.0, 2.0]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([1] * 3, "3 sizes for a step of 4 microbatches"),
        ([1] * 5, "5 sizes for a step of 4 microbatches"),
        ([1, -2, 1, 1], "microbatch 1 has -2 tokens on this rank, and must have 1 to 10"),
        ([1, 1, 1, 0], "microbatch 3 has 0 tokens"),
        ([1, 1, 1, 11], "microbatch 3 has 11 tokens .* DppConfig.max_tokens="),
    ],
)
@pytest.mark.parametrize("cap", ["static", "auto"])
def test_announced_sizes_that_cannot_be_are_refused(cap: str, sizes: list[int], said: str) -> None:
    made = decisions(activation_cap=cap)
    for geometry in (Geometry(2, 0, 1, 4), Geometry(2, 0, 1, 4, forward_only=True)):
        with pytest.raises(ConfigError, match=f"announce: {said}"):
            made.scheduler(geometry, backward=SPLIT, largest=10, sizes=sizes)
