"""The executor's contract with runners, transports, recorders and clocks, one rank at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.slices import Unit
from megatron.dpp.errors import PeerDead, ProtocolError, TransferTimeout
from megatron.dpp.inject import Task
from megatron.dpp.runtime.agreement import Decider, decider_for
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Mail
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Cause, Geometry, Scheduler
from megatron.dpp.schedule.scheduler import Stall
from megatron.dpp.trace import NullRecorder
from megatron.dpp.transport.base import Direction
from tests.fake_network import Delay, FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import Arithmetic


def rank_of(
    network: FakeNetwork, geometry: Geometry, runner: Arithmetic | None = None, **more: Any
) -> Executor:
    """The executor of one rank of two, or of ``topology``; ``more`` replaces its arguments, or
    those of its links.
    """
    topology = more.pop("topology", Topology((0, 1), geometry.rank, geometry.num_chunks))
    channels = topology.channels([4], more.pop("sends", [4]), 2)
    links = Links(network.transport(geometry.rank), channels)
    links.consumed = more.pop("consumed", links.consumed)
    scheduler = more.pop("scheduler", None) or scheduler_of(geometry)
    decider = decider_for(scheduler, channels.receiving, None)
    decider.start(links.consumed)
    given: dict[str, Any] = {
        "runner": runner or Arithmetic(topology), "decider": decider, "links": links,
        "recorder": NullRecorder(), "timer": HostTimer(), "injector": None,
    }  # fmt: skip
    settings = {"number": 0, "split_backward": False, "timeout": 20.0}
    settings |= {name: more.pop(name) for name in Iteration.__dataclass_fields__ if name in more}
    return Executor(**given | more, iteration=Iteration(**settings))


def decider_of(geometry: Geometry, topology: Topology) -> Decider:
    channels = topology.channels([4], [4], 2)
    Links(FakeNetwork(list(channels.specs)).transport(geometry.rank), channels)
    return decider_for(scheduler_of(geometry), channels.receiving, None)


def scheduler_of(geometry: Geometry) -> Scheduler:
    return Scheduler(geometry, cap=8, split_backward=False)


def network_of(
    rank: int, chunks: int = 1, delay: Delay = 0.0, sends: Sequence[int] = (4,), **more: Any
) -> FakeNetwork:
    specs = Topology((0, 1), rank, chunks).channels([4], sends, 2).specs
    return FakeNetwork(list(specs), delay=delay, **more)


LAST = Geometry(2, 1, 1, 2, forward_only=True)
"""The second of two ranks in an evaluation of two microbatches."""


# Tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ((1, 0, 0, 1), "iteration 1, microbatch 0, tensor 0 of 1"),
        ((0, 1, 0, 1), "iteration 0, microbatch 1, tensor 0 of 1"),
        ((0, 0, 1, 1), "iteration 0, microbatch 0, tensor 1 of 1"),
        ((0, 0, 0, 2), "iteration 0, microbatch 0, tensor 0 of 2"),
    ],
)
def test_a_message_with_any_other_label_is_refused(labels: tuple[int, ...], found: str) -> None:
    network = network_of(1)
    iteration, microbatch, part, num_parts = labels
    network.transport(0).put(
        0, torch.zeros(1), iteration=iteration, microbatch=microbatch, part=part,
        num_parts=num_parts,
    )  # fmt: skip
    expected = "expected iteration 0, microbatch 0, tensor 0 of 1"
    with pytest.raises(ProtocolError, match=f"{expected}, got {found}; do all ranks"):
        rank_of(network, LAST).run()


@pytest.mark.parametrize(("rank", "value"), [(0, 0.0), (1, 7.0)])
def test_the_first_chunk_tells_sizes_by_what_it_receives_or_first_sends(
    rank: int, value: float
) -> None:
    """A later chunk's microbatches are known already."""
    network, counted = network_of(rank, 2), list[float]()
    sender = network.transport(1 - rank)
    for channel, spec in enumerate(sender.outgoing):
        if spec.direction is Direction.FORWARD:
            sender.put(channel, torch.tensor([7.0]), iteration=0, microbatch=0)
    geometry = Geometry(2, rank, 2, 1, forward_only=True)
    rank_of(network, geometry, count_tokens=lambda tensors: counted.append(tensors.item())).run()
    assert counted == [value]


@pytest.mark.parametrize("agree", [True, False])
def test_microbatches_whose_sizes_differ_between_ranks_count_as_the_longest(agree: bool) -> None:
    geometry = Geometry(2, 0, 1, 2, forward_only=True)
    scheduler, sizes = scheduler_of(geometry), iter([3, 4])
    executor = rank_of(
        network_of(0), geometry, scheduler=scheduler, count_tokens=lambda _: next(sizes),
        sizes_agree=agree,
    )  # fmt: skip
    executor.run()
    assert scheduler.sizes.known == ([3, 4] if agree else [None, None])
    assert executor.first_size == 3, "what was measured has a size all the same"


class Noting(HostTimer):
    """Keeps what it is told of tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[tuple[str, int], float]] = []

    def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
        self.told.append((key, size))


def test_a_duration_is_learnt_with_the_size_of_its_microbatch() -> None:
    """In the largest; a size that is not known counts as that."""
    geometry = Geometry(2, 0, 1, 2, forward_only=True)
    scheduler, timer = scheduler_of(geometry), Noting()
    scheduler.learn(0, scheduler.sizes.largest // 4)
    rank_of(network_of(0), geometry, scheduler=scheduler, timer=timer).run()
    assert timer.told == [(("F", 0), 0.25), (("F", 0), 1.0)]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_as_many_tensors_are_sent_as_were_declared(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A neighbour that waits for another one would wait for ever."""
    monkeypatch.setattr(Arithmetic, "spread", lambda *_: [torch.zeros(1)] * number)
    executor = rank_of(
        network_of(0, sends=[4, 4]), Geometry(2, 0, 1, 1, forward_only=True), sends=[4, 4]
    )
    with pytest.raises(TypeError, match="2 Tensors declared") if number != 2 else nullcontext():
        executor.run()


# Missing senders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1])
def test_a_sender_that_left_in_a_later_iteration_is_named_with_the_message(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """Messages of earlier iterations are no messages of this one."""
    network = network_of(1)
    sender = network.transport(0)
    for microbatch in range(sent):
        sender.put(0, torch.zeros(1), iteration=3, microbatch=microbatch)
    sender.close()
    poll = FakeTransport.poll
    monkeypatch.setattr(FakeTransport, "poll", lambda own: [6 + n for n in poll(own)])
    executor = rank_of(network, LAST, number=3, consumed=[6], timeout=2.0)
    with pytest.raises(PeerDead, match=f"microbatch {sent} of iteration 3 .*has closed"):
        executor.run()
    assert len(executor.actions) == sent


def test_a_missing_message_of_a_later_chunk_is_named() -> None:
    network = network_of(1, chunks=2)
    sender = network.transport(0)
    first = next(i for i, spec in enumerate(sender.outgoing) if spec.chunk == 0)
    for microbatch in range(2):
        sender.put(first, torch.zeros(1), iteration=0, microbatch=microbatch)
    sender.close()
    executor = rank_of(network, Geometry(2, 1, 2, 2, forward_only=True), timeout=2.0)
    with pytest.raises(PeerDead, match=r"microbatch 0 of iteration 0 \(forward of chunk 1"):
        executor.run()
    assert [str(action) for action in executor.actions] == ["0F0", "0F1"]


def test_the_last_message_of_a_sender_that_left_is_used() -> None:
    """It is there although its sender is gone."""
    network = network_of(1)
    sender = network.transport(0)
    for microbatch in range(2):
        sender.put(0, torch.zeros(1), iteration=0, microbatch=microbatch)
    sender.close()
    executor = rank_of(network, LAST, timeout=2.0)
    executor.run()
    assert len(executor.actions) == 2


def test_a_message_that_comes_with_the_farewell_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives after the look at the channels and before the look at the peer."""
    network = network_of(1)
    executor = rank_of(network, LAST, timeout=2.0)

    def departed(own: FakeTransport, peer: int) -> bool:
        if not executor.actions and not own.poll()[0]:
            put(network, 2)
        return True

    monkeypatch.setattr(FakeTransport, "departed", departed)
    executor.run()
    assert len(executor.actions) == 2


# Time ---------------------------------------------------------------------------------------------


def put(network: FakeNetwork, number: int) -> None:
    sender = network.transport(0)
    for microbatch in range(number):
        sender.put(0, torch.zeros(1), iteration=0, microbatch=microbatch)


def test_the_deadline_is_the_timeout_after_the_last_task(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sleeps at most 50 ms at a time, and no longer than its deadline."""
    network = network_of(1, delay=lambda *_: 9.9, clock=clock, stepping=True)
    put(network, 1)
    naps: list[float] = []
    wait = FakeTransport.wait

    def noted(own: FakeTransport, seconds: float) -> bool:
        naps.append(seconds)
        return wait(own, seconds)

    monkeypatch.setattr(FakeTransport, "wait", noted)
    with pytest.raises(TransferTimeout, match="could run nothing for 10 s in iteration 0"):
        rank_of(network, LAST, timeout=10.0).run()
    assert 1019.9 < clock.now() <= 1019.9 + 0.0011
    assert max(naps) == 0.05 and min(naps) > 0.0


def test_a_message_just_in_time_is_no_timeout(clock: VirtualClock) -> None:
    network = network_of(1, delay=lambda *_: 9.99, clock=clock, stepping=True)
    put(network, 2)
    rank_of(network, LAST, timeout=10.0).run()


class NeverStarts(HostTimer):
    """A device that never gets the input of the task that was launched ahead."""

    def waiting(self) -> bool:
        return True


def test_the_deadline_of_a_device_is_the_timeout_too(clock: VirtualClock) -> None:
    network = network_of(1, delay=lambda *_: 0.5, clock=clock, stepping=True, ahead=True)
    put(network, 1)
    with pytest.raises(TransferTimeout, match=r"has not arrived after 1\.00005 s"):
        rank_of(network, LAST, timeout=1.0, timer=NeverStarts()).run()
    assert 1001.0 < clock.now() < 1001.001


def test_an_iteration_ends_when_its_outputs_have_left_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed: list[tuple[float, int]] = []
    network = network_of(0)
    executor = rank_of(network, Geometry(2, 0, 1, 3, forward_only=True), timeout=7.0)
    monkeypatch.setattr(
        FakeTransport, "flush", lambda _, seconds: flushed.append((seconds, len(executor.actions)))
    )
    executor.run()
    assert flushed == [(7.0, 3)]


def test_a_rank_that_is_full_names_who_takes_nothing(clock: VirtualClock) -> None:
    network = network_of(0, clock=clock, stepping=True)
    executor = rank_of(network, Geometry(2, 0, 1, 30, forward_only=True), timeout=3.0)
    with pytest.raises(TransferTimeout, match="receivers are alive but take nothing"):
        executor.run()
    assert 1003.0 < clock.now() < 1003.1 and len(executor.actions) < 30


def test_an_input_that_is_overdue_is_named_by_its_channel_and_microbatch(
    clock: VirtualClock,
) -> None:
    network = network_of(
        1, chunks=2, delay=lambda _, __, n: 0.5 * n, clock=clock, stepping=True, ahead=True
    )
    sender = network.transport(0)
    second = next(i for i, spec in enumerate(sender.outgoing) if spec.chunk == 1)
    for microbatch in range(2):
        sender.put(second, torch.zeros(1), iteration=5, microbatch=microbatch)
    geometry = Geometry(2, 1, 2, 4, forward_only=True)
    executor = rank_of(network, geometry, timer=NeverStarts(), timeout=2.0, number=5)
    with pytest.raises(TransferTimeout, match=r"microbatch 1 of iteration 5 .*chunk 1, rank 0"):
        executor.run()


def mail_of(size: int = 4) -> tuple[Mail, FakeTransport]:
    """The mail of the first of two ranks, whose messages have ``size`` bytes."""
    channels = Topology((0, 1), 0, 1).channels([size], [size], 2)
    transport = FakeNetwork(list(channels.specs)).transport(0)
    return Mail(Links(transport, channels), NullRecorder(), 0, 1.0), transport


@pytest.mark.parametrize(
    ("cause", "followed", "named"),
    [(Cause.POLICY, False, True), (Cause.POLICY, True, False), (Cause.MEMORY_CAP, False, False)],
)
def test_a_policy_is_suspected_where_it_alone_waits(
    cause: Cause, followed: bool, named: bool
) -> None:
    """A follower's leader decides; under a cap no policy could do otherwise."""
    mail, _ = mail_of()
    text = str(mail.stalled(Stall(cause, "the reason"), followed=followed))
    assert ("or the policy waits" in text) is named
    assert "(the reason); missing from: the leader of this stage. Every" in text


@pytest.mark.parametrize(
    ("pending", "pending_bytes", "full"),
    [(2, 800, False), (2, 801, True), (9, 801, True), (1, 10_000, False), (0, 0, False)],
)
def test_a_rank_is_full_above_eight_mean_messages(
    monkeypatch: pytest.MonkeyPatch, pending: int, pending_bytes: int, full: bool
) -> None:
    mail, transport = mail_of(100)
    for microbatch in range(4):
        mail.put(Direction.FORWARD, 0, microbatch, torch.zeros(25))
    monkeypatch.setattr(transport, "pending", lambda: pending)
    monkeypatch.setattr(transport, "pending_bytes", lambda: pending_bytes)
    assert mail.is_full() == full


class Injected:
    """Injects nothing, and keeps what it is asked for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def factor(self, task: Task) -> float:
        self.tasks.append(task)
        return 1.0

    def seconds(self, task: Task) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("pieces", "stock", "costs"),
    [
        (None, math.inf, {"0F": 0.5, "0B": 1.0, "1F": 0.5, "1B": 1.0}),
        ((2, 0), math.inf, {"0F": 0.5, "0B": 0.5, "0W": 0.25, "1F": 0.5, "1B": 1.0}),
        ((2, 0), 0, {"0F": 0.5, "0B": 0.5, "0W": 0.25, "1F": 0.5, "1B": 1.0}),
    ],
)
def test_the_work_of_a_rank_is_three_forwards_per_microbatch(
    pieces: tuple[int, ...] | None, stock: float, costs: dict[str, float]
) -> None:
    """Delays that depend on the work done so far are the same in all schedules."""
    topology, injected = Topology((0,), 0, 2), Injected()
    channels = topology.channels([4], [4], 2)
    links = Links(FakeNetwork(list(channels.specs)).transport(0), channels)
    split = pieces is not None
    geometry = Geometry(1, 0, 2, 2, w_pieces=pieces)
    scheduler = Scheduler(geometry, cap=8, split_backward=split, stock=stock)
    Executor(
        runner=Arithmetic(topology),
        decider=decider_for(scheduler, channels.receiving, None),
        links=links,
        recorder=NullRecorder(),
        timer=HostTimer(),
        injector=injected,
        iteration=Iteration(split_backward=split, number=5, timeout=20.0),
    ).run()  # type: ignore[arg-type]
    done = 0.0
    for task in injected.tasks:
        assert task.iteration == 5
        assert task.cost == costs[f"{task.chunk}{task.kind}"]
        assert task.begin == pytest.approx(done)
        done += task.cost
    assert done == pytest.approx(2 * 3)


@pytest.mark.parametrize("injects", [False, True])
def test_the_hosts_own_time_is_that_outside_of_tasks_and_delays(
    monkeypatch: pytest.MonkeyPatch, injects: bool
) -> None:
    now = 0

    def takes(nanoseconds: int, function: Any) -> Any:
        def timed(*given: Any) -> Any:
            nonlocal now
            now += nanoseconds
            return function(*given)

        return timed

    monkeypatch.setattr(
        "megatron.dpp.runtime.executor.time",
        SimpleNamespace(perf_counter_ns=lambda: now),
    )
    timer, injected = HostTimer(), Injected()
    injected.factor = takes(50_000, injected.factor)  # type: ignore[method-assign]
    topology = Topology((0,), 0, 1)
    runner = Arithmetic(topology)
    runner.forward = takes(1_000, runner.forward)  # type: ignore[method-assign]
    runner.backward = takes(1_000, runner.backward)  # type: ignore[method-assign]
    geometry = Geometry(1, 0, 1, 3)
    decider = decider_of(geometry, topology)
    decider.next = takes(7, decider.next)  # type: ignore[method-assign]
    executor = rank_of(
        FakeNetwork([]), geometry, runner, topology=topology, timer=timer, decider=decider,
        injector=injected if injects else None,
    )  # fmt: skip
    executor.run()
    assert executor.overhead_ns == 6 * 7


def test_a_rank_of_two_directions_counts_each_channel_for_itself() -> None:
    """The message that a stalled gradient lacks is that of its own channel."""
    network = network_of(0)
    executor = rank_of(network, Geometry(2, 0, 1, 2))
    network.transport(1).close()
    with pytest.raises(PeerDead, match=r"microbatch 0 of iteration 0 \(backward of chunk 0"):
        executor.run()


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, ["ran", "size", "early"]), (1, ["size", "early", "ran"])]
)
def test_the_next_task_is_decided_early_only_behind_the_size_of_this_one(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]
) -> None:
    """A leader that decided before a first stage's F told its size left its followers behind."""
    seen: list[str] = []
    network = network_of(rank)
    geometry = Geometry(2, rank, 1, 1, forward_only=True)
    topology = Topology((0, 1), rank, 1)
    runner, decider = Arithmetic(topology), decider_of(geometry, topology)
    forward = runner.forward

    def ran(*given: Any) -> Any:
        seen.append("ran")
        return forward(*given)

    monkeypatch.setattr(runner, "forward", ran)
    monkeypatch.setattr(decider, "look_ahead", lambda: seen.append("early"))
    if rank == 1:
        network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=0)
    count = lambda _: seen.append("size")  # noqa: E731
    rank_of(network, geometry, runner, decider=decider, count_tokens=count).run()
    assert seen == expected


def test_slices_of_one_row_are_timed_by_their_keys() -> None:
    """The timer took a row's slices as equally long, and waited too long for the short ones."""
    found: dict[str, list[float]] = {}

    class Timer(HostTimer):
        def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
            found.setdefault(key[0], []).append(size)

    geometry = Geometry(1, 0, 1, 2, groups=(2,))
    units = Unit(0, 0, 32, 64), Unit(0, 32, 64, 64)
    shares = [1.0 + each.earlier_keys / 32 for each in units]
    assert shares == [1.0, 2.0]
    network = FakeNetwork([])
    more = {"timer": Timer(), "split_backward": True, "topology": Topology((0,), 0, 1)}
    scheduler = Scheduler(geometry, cap=8)
    longer = {"F": shares, "B": [3 * each for each in shares]}
    rank_of(network, geometry, scheduler=scheduler, longer=longer, **more).run()
    assert found == {"F": [1.0, 2.0], "B": [6.0, 3.0], "W": [1.0, 1.0]}
