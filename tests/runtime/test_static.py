"""megatron-core's schedule behind ours: its exchange over our channels, tasks that are prolonged,
slots of graphs, and the steps around it. test_equality.py compares its numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.inject import Task
from megatron.dpp.runtime import static
from megatron.dpp.runtime.host_trace import Step, around_steps, traced
from megatron.dpp.runtime.static import (
    ChannelExchange,
    StaticSchedule,
    over_channels,
    ring_channels,
)
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import ChannelSpec, Direction
from tests.fake_network import FakeNetwork


def two_ranks() -> FakeNetwork:
    return FakeNetwork([*{*ring_channels((0, 1), 0, 64, 2), *ring_channels((0, 1), 1, 64, 2)}])


class Wire:
    """A transport whose neighbours send what they are asked to, and that notes what is put."""

    ahead = False

    def __init__(self, *arriving: torch.Tensor) -> None:
        ways = (Direction.FORWARD, Direction.BACKWARD)
        self.outgoing = [SimpleNamespace(direction=way) for way in ways]
        self.incoming = [SimpleNamespace(direction=way, source=0) for way in ways]
        self.arriving = {0: list(arriving), 1: [-each for each in arriving]}
        self.put_so_far: list[Any] = []
        self.took = [0, 0]
        self.flushed = 0

    def put(self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int) -> None:
        assert tensor.is_contiguous() and not tensor.requires_grad
        self.put_so_far.append((channel, microbatch, tensor.tolist()))

    def poll(self) -> list[int]:
        """One message more than was taken has arrived; ``ahead``: it is coming."""
        return [count + (not self.ahead) for count in self.took]

    def coming(self) -> list[int]:
        return [count + 1 for count in self.took] if self.ahead else []

    def take(self, channel: int) -> Any:
        self.took[channel] += 1
        return SimpleNamespace(tensor=self.arriving[channel].pop(0))

    def departed(self, source: int) -> bool:
        return False

    def links(self) -> list[Any]:
        return []

    def flush(self, timeout: float) -> None:
        self.flushed += 1


def ask(exchange: ChannelExchange, **asked: Any) -> Any:
    usual = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False,
             "recv_next": False}  # fmt: skip
    config = SimpleNamespace(pipeline_dtype=torch.float32)
    return exchange.communicate(SimpleNamespace(config=config), **usual | asked)


def test_messages_are_numbered_by_direction_and_flushed_after_the_step() -> None:
    wire: Any = Wire(torch.ones(2), torch.full((2,), 2.0))
    exchange = ChannelExchange(wire, timeout=5.0)
    strided = torch.arange(4.0).view(2, 2).t().requires_grad_()
    with over_channels(exchange):
        for _ in range(2):
            ask(exchange, tensor_send_next=strided)
        ask(exchange, tensor_send_prev=strided)
        assert not wire.flushed
    assert wire.flushed == 1
    rows = [[0.0, 2.0], [1.0, 3.0]]
    assert wire.put_so_far == [(0, 0, rows), (0, 1, rows), (1, 0, rows)]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_received_comes_in_order_from_its_side(ahead: bool) -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    wire: Any = Wire(one, two)
    wire.ahead = ahead
    exchange = ChannelExchange(wire, timeout=5.0)
    previous, following, handles = ask(exchange, recv_prev=True, recv_next=True)
    assert torch.equal(previous, one) and torch.equal(following, -one) and handles is None
    assert previous.requires_grad and following.requires_grad
    previous, following, handles = ask(exchange, recv_prev=True, wait_on_reqs=False)
    assert following is None and not len(previous) and wire.took == [1, 1]
    handles["recv_prev"].wait()
    assert torch.equal(previous, two) and previous.requires_grad and wire.took == [2, 1]


def test_a_step_does_not_end_before_what_was_taken_in_flight_has_come() -> None:
    """Else the device would wait for ever for a sender that died."""
    network = two_ranks()
    network.ahead = True
    transport = network.transport(1)
    exchange: Any = ChannelExchange(transport, timeout=0.1)
    taken: Any = SimpleNamespace(tensor=torch.ones(2))
    transport.coming, transport.take = lambda: [1, 1], lambda channel: taken  # type: ignore[method-assign]
    with (
        pytest.raises(TransferTimeout, match=r"microbatch 0 .* has not arrived"),
        over_channels(exchange),
    ):
        ask(exchange, recv_prev=True)


def test_a_sender_is_waited_for_unless_it_has_left() -> None:
    """Messages that it sent before are taken, also one that it sends as it leaves."""
    network = two_ranks()
    sender, exchange = network.transport(0), ChannelExchange(network.transport(1), timeout=0.1)
    out = next(i for i, s in enumerate(sender.outgoing) if s.direction == Direction.FORWARD)
    with pytest.raises(TransferTimeout, match="rank 0 is alive"):
        exchange.take(Direction.FORWARD)
    sender.put(out, torch.ones(4), iteration=0, microbatch=0)
    sender.flush(5.0)
    sender.close()
    assert torch.equal(exchange.take(Direction.FORWARD), torch.ones(4))
    with pytest.raises(PeerDead, match=r"microbatch 1 .* rank 0 has closed"):
        exchange.take(Direction.FORWARD)
    wire: Any = Wire(torch.ones(2))
    looks = iter([[0, 0]])
    wire.poll = lambda: next(looks, [1, 0])
    left = iter([False])
    wire.departed, wire.wait = lambda source: next(left, True), lambda seconds: None
    assert torch.equal(ChannelExchange(wire, timeout=5.0).take(Direction.FORWARD), torch.ones(2))


def ends(channel: ChannelSpec) -> tuple[int, int, int, Direction]:
    return channel.source, channel.destination, channel.chunk, channel.direction


class Traced:
    """A static schedule call that is traced: its steps make ``output`` and exchange nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
        self.output, self.put = torch.zeros(3), list[Any]()
        self.received, self.gradient, self.taken = torch.ones(1), torch.ones(2), list[Any]()
        self.recorder: Any = SimpleNamespace(
            enabled=True, iteration=0, mark=lambda: 0,
            put=lambda channel, *given: self.put.append((channel, given)),
            taken=lambda channel, found: self.taken.append((ends(channel), found.microbatch)),
            begin_task=lambda *task: None, end_task=lambda: None,
            gap=lambda *_: None,
        )  # fmt: skip
        self.rank = rank
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        for name in ("forward_step", "backward_step"):  # are checked before they are exchanged
            compat.resolve(f"pipeline_parallel.schedules:{name}")
        compat.resolve("pipeline_parallel.p2p_communication:P2PCommunicator._communicate")
        monkeypatch.setattr(schedules, "forward_step", lambda *_, **__: (self.output, 0))
        monkeypatch.setattr(schedules, "backward_step", lambda *_: None)
        arrive = self.received, self.gradient, None
        monkeypatch.setattr(P2PCommunicator, "_communicate", lambda own, **_: arrive)

    def forward(self, chunk: int, microbatch: int) -> None:
        schedules.forward_step(
            None, None, None, 1, self.received, current_microbatch=microbatch, vp_stage=chunk
        )

    def communicate(self, **asked: Any) -> None:
        """Of one of three ranks."""
        rank = self.rank
        own = SimpleNamespace(
            pp_group=SimpleNamespace(rank=lambda: rank, size=lambda: 3),
            next_rank=(rank + 1) % 3, prev_rank=(rank - 1) % 3,
        )  # fmt: skip
        nothing = {"tensor_send_next": None, "tensor_send_prev": None,
                   "recv_prev": False, "recv_next": False}  # fmt: skip
        P2PCommunicator._communicate(own, **nothing | asked)


@pytest.mark.parametrize(
    ("rank", "way", "chunk", "expected"),
    [
        (0, "send_next", 1, (0, 1, 1)),
        (2, "send_next", 0, (2, 0, 1)),  # the last rank sends to the first one's next chunk
        (2, "send_prev", 1, (2, 1, 1)),
        (0, "send_prev", 1, (0, 2, 0)),
    ],
)
def test_a_trace_names_the_chunk_that_receives(
    rank: int, way: str, chunk: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Traced(monkeypatch, rank)
    with traced(made.recorder):
        made.forward(chunk, 7)
        made.communicate(**{f"tensor_{way}": made.output})
    ((channel, given),) = made.put
    direction = Direction.FORWARD if way == "send_next" else Direction.BACKWARD
    assert ends(channel) == (*expected, direction) and given == (7, 12, "p2p")


def test_a_message_has_arrived_from_its_side_when_a_step_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Traced(monkeypatch)
    with traced(made.recorder):
        made.communicate(recv_prev=True)
        made.communicate(recv_next=True)
        assert not made.taken
        made.forward(2, 7)
        schedules.backward_step(made.received, made.output, made.gradient)
    assert made.taken == [((0, 1, 2, Direction.FORWARD), 7), ((2, 1, 2, Direction.BACKWARD), 7)]


def test_a_backward_belongs_to_the_forward_that_made_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An output's storage may be used anew, for another microbatch."""
    made, told = Traced(monkeypatch), list[Any]()
    monkeypatch.setattr(schedules, "backward_step", lambda *given: made.gradient)
    originals = schedules.forward_step, schedules.backward_step
    with around_steps(lambda *given: told.append(given), lambda *given: told.append(given)):
        for number in (4, 5):
            made.forward(1, number)
            schedules.backward_step(made.received, [made.output], [made.gradient])
        schedules.backward_step(made.received, made.output, made.gradient)
    assert (schedules.forward_step, schedules.backward_step) == originals
    steps = [("F", 1, 4), ("B", 1, 4), ("F", 1, 5), ("B", 1, 5), ("B", 0, 0)]
    assert [tuple(step) for step, _ in told] == [step for step in steps for _ in range(2)]
    expected = (made.received, made.output, made.gradient, made.gradient)
    assert all(found is tensor for (_, found), tensor in zip(told, expected, strict=False))


def test_tasks_cost_a_share_of_the_rank_and_a_backward_twice_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the dynamic schedule, so that delays cover the same share of the work. Tasks are
    timed although nothing is chosen by it: a factor is one of the task's own time.
    """
    tasks, timed, after = list[Task](), list[Any](), list[Any]()
    injector = SimpleNamespace(
        delays_messages=False, factor=lambda task: tasks.append(task) or 1.5, seconds=lambda _: 0.25
    )
    timer = SimpleNamespace(
        prolong=lambda *given: timed.append(given), launched=lambda key: timed.append(key)
    )
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 4))
    monkeypatch.setattr(static, "around_steps", lambda _, one: nullcontext(after.append(one)))
    monkeypatch.setattr(static, "static_schedule", lambda *_: lambda **given: [])
    monkeypatch.setattr(static, "injector_of", lambda *_: injector)
    monkeypatch.setattr(static, "timer_for", lambda: timer)
    monkeypatch.setattr("megatron.dpp.runtime.base.needs_task_rng", lambda *_, **__: False)
    own = StaticSchedule(DppConfig(inject="delay:1ms"), seed=1)
    own.iteration = 9
    for _ in range(2):
        own(model=torch.nn.Identity(), forward_step_func=None)
    for step in (Step("F", 0, 1), Step("B", 3, 2), Step("F", 2, 3)):
        after[0](step, None)
    after[1](Step("F", 0, 0), None)
    assert tasks == [
        Task(9, "F", 0, 1, 0.0, 0.25), Task(9, "B", 3, 2, 0.25, 0.5),
        Task(9, "F", 2, 3, 0.75, 0.25), Task(10, "F", 0, 0, 0.0, 0.25),
    ]  # fmt: skip
    assert timed[:2] == [(("F", 0), 1.5, 0.25), ("F", 0)] and len(timed) == 8


@pytest.mark.parametrize(("group", "most"), [(None, 5), (0, 5), (2, 5), (4, 7)])
def test_graphs_have_slots_for_the_groups_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, group: int | None, most: int
) -> None:
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 2))
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=group)
    call: Any = SimpleNamespace(
        model=[], pg_collection=None, num_microbatches=8, forward_only=False, config=config,
        cut=None,
    )  # fmt: skip
    assert static.most_held(call) == most, "the warm-up of a larger group holds more"
