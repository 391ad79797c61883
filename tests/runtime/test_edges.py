"""Measurements and announcements, and the schedulers and caps that follow from it."""

from __future__ import annotations

import pytest

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.schedule import Action, Geometry, Memory


def decisions(said: list[str]) -> Decisions:
    return Decisions(DppConfig(), said.append, 0, decides=True)


def test_measured_memory_is_logged_in_mebibytes() -> None:
    said: list[str] = []
    made = decisions(said)
    made.measured(Memory(activation_bytes=7 << 19, deferred_bytes=3 << 19))
    assert "an activation takes 3.5 MiB" in said[0] and "keeps 1.5 MiB" in said[0]
    made.measured(Memory(activation_bytes=0, deferred_bytes=0))
    assert len(said) == 1, "nothing was measured"


def test_schedulers_are_built_anew_with_what_was_measured() -> None:
    """A scheduler that is kept would go on with the beta of the first step."""
    made = decisions([])
    geometry = Geometry(2, 0, 1, 4, w_pieces=(2,))
    first = made.scheduler(geometry, backward=Backward())
    assert made.scheduler(geometry, backward=Backward()) is first
    made.measured(Memory(activation_bytes=100, deferred_bytes=60))
    second = made.scheduler(geometry, backward=Backward())
    assert second is not first and made.scheduler(geometry, backward=Backward()) is second
    held = []
    for scheduler in (first, second):
        scheduler.run(Action.parse("0F0"))
        scheduler.arrived(Direction.BACKWARD, 0, 1)
        scheduler.run(Action.parse("0B0"))
        held.append(scheduler.held)
    assert held[1] == pytest.approx(0.6) and held[0] != held[1]


def test_a_call_with_shorter_sequences_has_a_scheduler_of_its_own() -> None:
    made, geometry = decisions([]), Geometry(2, 0, 1, 4)
    for largest in (8, 4, 8):
        assert (
            made.scheduler(geometry, backward=Backward(split=False), largest=largest).sizes.largest
            == largest
        )


def test_the_head_is_counted_in_slots_once_their_size_is_known() -> None:
    """Its logits are as many bytes as before, and a slot holds more than an eager activation."""
    geometry = Geometry(4, 3, 2, 16)
    made = decisions([])
    made.measured(Memory(activation_bytes=100, deferred_bytes=60, head_room=8.0))
    made.measured_slots(400)
    assert made.activation_bytes == 400
    caps = [made.scheduler(geometry, backward=Backward()).cap]
    for room in (2.0, 8.0):
        other = decisions([])
        other.measured(Memory(activation_bytes=400, deferred_bytes=400, head_room=room, slots=True))
        caps.append(other.scheduler(geometry, backward=Backward()).cap)
    assert caps[0] == caps[1] > caps[2]


def test_the_cap_is_that_of_the_last_training_step() -> None:
    made = decisions([])
    assert made.cap == 0.0
    for number, (forward_only, cap) in enumerate([(True, 0.0), (False, 3.0), (True, 3.0)], 3):
        geometry = Geometry(2, 0, 1, number, forward_only=forward_only)
        made.scheduler(geometry, backward=Backward(split=False))
        assert made.cap == cap


def test_a_scheduler_that_is_kept_follows_the_static_peak_of_the_batches() -> None:
    made = Decisions(DppConfig(activation_cap="static"), lambda _: None, 0, decides=True)
    geometry, caps = Geometry(2, 0, 1, 4), []
    for size in (1, 10, 1):
        scheduler = made.scheduler(geometry, backward=Backward(), largest=10, sizes=[size] * 4)
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
    made = Decisions(DppConfig(activation_cap=cap), lambda _: None, 0, decides=True)
    for geometry in (Geometry(2, 0, 1, 4), Geometry(2, 0, 1, 4, forward_only=True)):
        with pytest.raises(ConfigError, match=f"announce: {said}"):
            made.scheduler(geometry, backward=Backward(), largest=10, sizes=sizes)
