"""The executor's contract with runners, transports, recorders and clocks, one rank at a time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError, TransferTimeout
from megatron.dpp.inject import Task
from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.executor import Executor, Links
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Action, Cause, Geometry, Scheduler
from megatron.dpp.schedule.scheduler import Stall
from megatron.dpp.trace import NullRecorder
from megatron.dpp.transport.base import Direction
from megatron.dpp.transport.fake import Delay, FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import Arithmetic


def rank_of(
    network: FakeNetwork, geometry: Geometry, runner: Arithmetic | None = None, **more: Any
) -> Executor:
    """The executor of one rank of two, or of ``topology``; ``more`` replaces its arguments."""
    topology = more.pop("topology", Topology((0, 1), geometry.rank, geometry.num_chunks))
    channels = topology.channels([4], [4], 2)
    links = Links(network.transport(geometry.rank), channels)
    links.consumed = more.pop("consumed", links.consumed)
    scheduler = Scheduler(geometry, cap=8, split_backward=False)
    decider = decider_for(scheduler, channels.receiving, None)
    decider.start(links.consumed)
    given: dict[str, Any] = {
        "runner": runner or Arithmetic(topology), "decider": decider, "links": links,
        "recorder": NullRecorder(), "timer": HostTimer(), "injector": None,
        "split_backward": False, "iteration": 0, "timeout": 20.0,
    }  # fmt: skip
    return Executor(**given | more)


def network_of(rank: int, chunks: int = 1, delay: Delay = 0.0, **more: Any) -> FakeNetwork:
    specs = Topology((0, 1), rank, chunks).channels([4], [4], 2).specs
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
    executor = rank_of(network_of(rank, 2), Geometry(2, rank, 2, 1, forward_only=True))
    counted: list[float] = []
    own: Any = executor
    own._count_tokens = lambda tensors: counted.append(tensors.item())
    own._receive = lambda *_: torch.tensor([7.0]) if rank else None
    own._put = lambda *_: False
    for chunk in range(2):
        executor._forward(Action.parse(f"{chunk}F0"))
    assert counted == [value]


@pytest.mark.parametrize("agree", [True, False])
def test_microbatches_whose_sizes_differ_between_ranks_count_as_the_longest(agree: bool) -> None:
    executor = rank_of(
        network_of(0), Geometry(2, 0, 1, 2, forward_only=True),
        count_tokens=torch.Tensor.numel, sizes_agree=agree,
    )  # fmt: skip
    for microbatch in range(2):
        executor._learn(microbatch, torch.zeros(3 + microbatch))
    assert executor._scheduler.sizes.known == ([3, 4] if agree else [None, None])
    assert executor.first_size == 3, "what was measured has a size all the same"


def test_a_duration_is_learnt_with_the_size_of_its_microbatch() -> None:
    """In the largest; a size that is not known counts as that."""
    executor, told = rank_of(network_of(0), Geometry(2, 0, 1, 2)), list[Any]()
    own: Any = executor
    own._timer = SimpleNamespace(launched=lambda key, size: told.append((key, size)))
    sizes = executor._scheduler.sizes
    sizes.learn(0, sizes.largest // 4)
    for microbatch in range(2):
        executor._finish_task("F", 0, microbatch)
    assert told == [(("F", 0), 0.25), (("F", 0), 1.0)]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_as_many_tensors_are_sent_as_were_declared(number: int) -> None:
    """A neighbour that waits for another one would wait for ever."""
    executor = rank_of(network_of(0), Geometry(2, 0, 1, 2))
    own: Any = executor
    own._channels = SimpleNamespace(outgoing=lambda *_: 0, tensors_out=lambda _: 2)
    own._put_part = lambda *_: None
    with pytest.raises(TypeError, match="2 Tensors declared"):
        own._put(Direction.FORWARD, 0, 0, [torch.zeros(1)] * number)
    assert own._put(Direction.FORWARD, 0, 0, [torch.zeros(1)] * 2)


@pytest.mark.parametrize("launch_ahead", [True, False])
def test_a_task_is_launched_ahead_of_its_input_where_that_is_asked_for(launch_ahead: bool) -> None:
    executor = rank_of(network_of(1), LAST, launch_ahead=launch_ahead)
    own: Any = executor
    own._links = SimpleNamespace(coming=lambda: [1])
    assert own._next_coming() == (Action.parse("0F0") if launch_ahead else None)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_gap_lasts_until_a_task_has_its_input(ahead: bool) -> None:
    own: Any = rank_of(network_of(1), LAST)
    own._open_gap("message")
    own._begin(Action.parse("0F0"), ahead=ahead)
    assert own._gap_cause == ("message" if ahead else "")


def test_a_wait_behind_a_task_becomes_one_for_an_input() -> None:
    own: Any = rank_of(network_of(1), LAST)
    own._open_gap("lookahead")
    own._next_coming()
    assert (own._gap_cause, own._gap_detail) == ("warm-up", "F0")


# Missing senders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1])
def test_a_sender_that_left_in_a_later_iteration_is_named_with_the_message(sent: int) -> None:
    """Messages of earlier iterations are no messages of this one."""
    network = network_of(1)
    sender = network.transport(0)
    for microbatch in range(sent):
        sender.put(0, torch.zeros(1), iteration=3, microbatch=microbatch)
    sender.close()
    executor = rank_of(network, LAST, iteration=3, consumed=[6], timeout=2.0)
    poll = executor._links.poll
    executor._links.poll = lambda: [6 + poll()[0]]  # type: ignore[method-assign]
    executor._taken = [6]
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


def stalled(full: bool) -> Executor:
    """The first rank of an evaluation, past its deadline."""
    executor: Any = rank_of(network_of(0), Geometry(2, 0, 1, 3, forward_only=True), timeout=-1.0)
    executor._is_full = lambda: full
    executor._gap_start = time.monotonic_ns()
    return executor


@pytest.mark.parametrize("full", [True, False])
def test_a_rank_that_is_full_names_who_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    def flush(_: FakeTransport, seconds: float) -> None:
        assert seconds == 0.0
        raise TransferTimeout("rank 1 has taken nothing")

    monkeypatch.setattr(FakeTransport, "flush", flush)
    message = "rank 1 has taken nothing" if full else "could run nothing"
    with pytest.raises(TransferTimeout, match=message):
        stalled(full)._sleep()


def test_an_input_that_is_overdue_is_named_by_its_channel_and_microbatch() -> None:
    executor: Any = rank_of(
        network_of(1, 2), Geometry(2, 1, 2, 4), timer=NeverStarts(), timeout=-1.0, iteration=5
    )
    channel = executor._channels.incoming(Direction.FORWARD, 1)
    executor._awaited, executor._gap_start = (channel, 3), time.monotonic_ns()
    with pytest.raises(TransferTimeout, match=r"microbatch 3 of iteration 5 .*chunk 1, rank 0"):
        executor._input_came()


@pytest.mark.parametrize(
    ("cause", "followed", "named"),
    [(Cause.POLICY, False, True), (Cause.POLICY, True, False), (Cause.MEMORY_CAP, False, False)],
)
def test_a_policy_is_suspected_where_it_alone_waits(
    cause: Cause, followed: bool, named: bool
) -> None:
    """A follower's leader decides; under a cap no policy could do otherwise."""
    executor: Any = stalled(full=False)
    executor._scheduler = SimpleNamespace(stall=lambda: Stall(cause, "the reason"))
    executor._decider = SimpleNamespace(followed=followed)
    text = executor._timeout_text()
    assert ("waits for messages that its neighbours" in text) is named
    assert "(the reason); missing from: the leader of this stage. Every" in text


@pytest.mark.parametrize(
    ("pending", "pending_bytes", "full"),
    [(2, 800, False), (2, 801, True), (9, 801, True), (1, 10_000, False), (0, 0, False)],
)
def test_a_rank_is_full_above_eight_mean_messages(
    pending: int, pending_bytes: int, full: bool
) -> None:
    executor = rank_of(network_of(0), Geometry(2, 0, 1, 3, forward_only=True))
    executor._num_puts, executor._put_bytes = 4, 400
    transport: Any = executor._transport
    transport.pending, transport.pending_bytes = lambda: pending, lambda: pending_bytes
    assert executor._is_full() == full


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
    ("pieces", "costs"),
    [
        (None, {"0F": 0.5, "0B": 1.0, "1F": 0.5, "1B": 1.0}),
        ((2, 0), {"0F": 0.5, "0B": 0.5, "0W": 0.25, "1F": 0.5, "1B": 1.0}),
    ],
)
def test_the_work_of_a_rank_is_three_forwards_per_microbatch(
    pieces: tuple[int, ...] | None, costs: dict[str, float]
) -> None:
    """Delays that depend on the work done so far are the same in all schedules."""
    topology, injected = Topology((0,), 0, 2), Injected()
    channels = topology.channels([4], [4], 2)
    links = Links(FakeNetwork(list(channels.specs)).transport(0), channels)
    split = pieces is not None
    scheduler = Scheduler(Geometry(1, 0, 2, 2, w_pieces=pieces), cap=8, split_backward=split)
    Executor(
        runner=Arithmetic(topology), decider=decider_for(scheduler, channels.receiving, None),
        links=links, recorder=NullRecorder(), timer=HostTimer(),
        injector=injected, split_backward=split, iteration=5, timeout=20.0,
    ).run()  # type: ignore[arg-type]  # fmt: skip
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
        SimpleNamespace(monotonic_ns=time.monotonic_ns, perf_counter_ns=lambda: now),
    )
    timer, injected = HostTimer(), Injected()
    injected.factor = takes(50_000, injected.factor)  # type: ignore[method-assign]
    topology = Topology((0,), 0, 1)
    runner = Arithmetic(topology)
    runner.forward = takes(1_000, runner.forward)  # type: ignore[method-assign]
    runner.backward = takes(1_000, runner.backward)  # type: ignore[method-assign]
    executor = rank_of(
        FakeNetwork([]), Geometry(1, 0, 1, 3), runner, topology=topology, timer=timer,
        injector=injected if injects else None,
    )  # fmt: skip
    executor._decider.next = takes(7, executor._decider.next)  # type: ignore[method-assign]
    executor.run()
    assert executor.overhead_ns == 6 * 7


def test_a_rank_of_two_directions_counts_each_channel_for_itself() -> None:
    """The message that a stalled gradient lacks is that of its own channel."""
    network = network_of(0)
    executor = rank_of(network, Geometry(2, 0, 1, 2))
    network.transport(1).close()
    with pytest.raises(PeerDead, match=r"microbatch 0 of iteration 0 \(backward of chunk 0"):
        executor.run()
    assert executor._channels.incoming(Direction.BACKWARD, 0) == 0
    assert executor._channels.incoming(Direction.FORWARD, 0) is None


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
    executor = rank_of(network, geometry, count_tokens=lambda _: seen.append("size"))
    forward = executor._runner.forward

    def ran(*given: Any) -> Any:
        seen.append("ran")
        return forward(*given)

    monkeypatch.setattr(executor._runner, "forward", ran)
    monkeypatch.setattr(executor._decider, "look_ahead", lambda: seen.append("early"))
    if rank == 1:
        network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=0)
    executor.run()
    assert seen == expected
