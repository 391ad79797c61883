"""Edges of the runtime's rules: what is counted, waited for and logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core import rng
from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, PeerDead
from megatron.dpp.runtime.base import PipelineSchedule
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.schedule import Action, Geometry, Memory
from megatron.dpp.trace import NullRecorder, Recorder
from megatron.dpp.transport import TransportOptions
from tests.fake_network import FakeNetwork
from tests.runtime.pipelines import Topology
from tests.runtime.test_executor_contract import rank_of


def test_a_rank_between_a_live_and_a_gone_neighbour_names_the_gone_one() -> None:
    """It waits for an input and for a gradient; only the gradient's sender has left."""
    topology = Topology((0, 1, 2), 1, 1)
    network = FakeNetwork(list(topology.channels([4], [4], 2).specs))
    network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=0)
    network.transport(2).close()
    executor = rank_of(network, Geometry(3, 1, 1, 4), topology=topology, timeout=2.0)
    with pytest.raises(PeerDead, match=r"microbatch 0 of iteration 0 \(backward of chunk 0"):
        executor.run()
    assert [str(action) for action in executor.actions] == ["0F0"]


@pytest.mark.parametrize(
    ("settings", "forward_only", "needed"),
    [
        ({}, False, False),
        ({"hidden_dropout": 0.1}, False, True),
        ({"attention_dropout": 0.1}, False, True),
        ({"hidden_dropout": 0.1}, True, False),
        ({"moe_input_jitter_eps": 0.1}, True, True),
        ({"moe_router_force_load_balancing": True}, True, True),
    ],
)
def test_tasks_are_seeded_where_a_forward_draws(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], forward_only: bool, needed: bool
) -> None:
    given = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
    }  # fmt: skip
    monkeypatch.setattr(rng, "get_model_config", lambda _: SimpleNamespace(**given | settings))
    assert rng.needs_task_rng([torch.nn.Identity()], forward_only=forward_only) is needed


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
    caps = [made.scheduler(geometry, backward=Backward()).view.cap]
    for room in (2.0, 8.0):
        other = decisions([])
        other.measured(Memory(activation_bytes=400, deferred_bytes=400, head_room=room, slots=True))
        caps.append(other.scheduler(geometry, backward=Backward()).view.cap)
    assert caps[0] == caps[1] > caps[2]


def test_the_cap_is_that_of_the_last_training_step() -> None:
    made = decisions([])
    assert made.cap == 0.0
    for number, (forward_only, cap) in enumerate([(True, 0.0), (False, 3.0), (True, 3.0)], 3):
        geometry = Geometry(2, 0, 1, number, forward_only=forward_only)
        made.scheduler(geometry, backward=Backward(split=False))
        assert made.cap == cap


def test_another_model_forgets_what_was_measured() -> None:
    made = decisions([])
    geometry = Geometry(2, 0, 1, 4, w_pieces=(2,))
    made.measured(Memory(activation_bytes=100, deferred_bytes=60))
    measured = made.scheduler(geometry, backward=Backward())
    made.renew()
    assert made.wants_measuring and made.activation_bytes == 0
    assert made.scheduler(geometry, backward=Backward()) is not measured


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


@pytest.mark.parametrize("number", [0, -1, 3, 6, 1 << 21])
def test_the_most_pending_messages_are_a_power_of_two(number: int) -> None:
    for allowed in (1, 2, 64, 1 << 20):
        assert TransportOptions(max_pending=allowed).max_pending == allowed
    with pytest.raises(ConfigError, match=f"max_pending is {number}"):
        TransportOptions(max_pending=number)


class Idle(PipelineSchedule):
    """A schedule that runs nothing."""

    injected_seconds = 0.0

    def __call__(self, **keywords: Any) -> list[Any]:
        self._log("a line")
        return [self._seed]

    def close(self) -> None:
        pass

    def _links(self) -> None:
        return None


def test_a_schedule_records_into_what_it_is_given_or_nowhere() -> None:
    recorder, said = Recorder(), list[str]()
    given = Idle(DppConfig(slots=3), recorder=recorder, seed=0, log=said.append)
    assert given.recorder is recorder and given.config.slots == 3
    assert given() == [0] and said == ["a line"]
    usual = Idle()
    assert isinstance(usual.recorder, NullRecorder)
    assert usual() == [torch.initial_seed()] and usual.iteration == 0
