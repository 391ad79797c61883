"""The executor's contract with runners, transports and clocks, one rank at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron.dpp.core.slices import Unit
from megatron.dpp.errors import PeerDead, ProtocolError, TransferTimeout
from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Mail
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Action, Cause, Geometry, Scheduler, View
from megatron.dpp.schedule.scheduler import Stall
from megatron.dpp.trace import NullRecorder
from megatron.dpp.transport.base import Direction
from tests.fake_network import FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import (
    FIRST,
    LAST,
    Arithmetic,
    NeverStarts,
    check_values,
    network_of,
    put,
    rank_of,
    run_pipeline,
)

EVALUATION = {"forward_only": True}
TWO = Geometry(2, 1, 1, 2, **EVALUATION)
"""The second of two ranks in an evaluation of two microbatches."""
THIRTY = Geometry(2, 0, 1, 30, **EVALUATION)
"""The first one, with more outputs than its receiver takes."""


def ran(executor: Any) -> list[str]:
    return [str(action) for action in executor.actions]


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
    network = network_of(LAST)
    iteration, microbatch, part, num_parts = labels
    network.transport(0).put(
        0, torch.zeros(1), iteration=iteration, microbatch=microbatch, part=part,
        num_parts=num_parts,
    )  # fmt: skip
    expected = "expected iteration 0, microbatch 0, tensor 0 of 1"
    with pytest.raises(ProtocolError, match=f"{expected}, got {found}; do all ranks"):
        rank_of(network, TWO).run()


@pytest.mark.parametrize(("rank", "value"), [(0, 0.0), (1, 7.0)])
def test_the_first_chunk_tells_sizes_by_what_it_receives_or_first_sends(
    rank: int, value: float
) -> None:
    """A later chunk's microbatches are known already."""
    network, counted = network_of(Topology((0, 1), rank, 2)), list[float]()
    sender = network.transport(1 - rank)
    for channel, spec in enumerate(sender.outgoing):
        if spec.direction is Direction.FORWARD:
            sender.put(channel, torch.tensor([7.0]), iteration=0, microbatch=0)
    geometry = Geometry(2, rank, 2, 1, **EVALUATION)
    rank_of(network, geometry, count_tokens=lambda tensors: counted.append(tensors.item())).run()
    assert counted == [value]


class Noting(TaskTimer):
    """Keeps what it is told of tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float]] = []

    def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
        self.told.append((key[0], size))


@pytest.mark.parametrize("agree", [True, False])
def test_durations_are_learnt_with_the_sizes_of_microbatches(agree: bool) -> None:
    """In the largest, as which one counts that is not known, or differs between ranks."""
    geometry, timer = Geometry(2, 0, 1, 3, **EVALUATION), Noting()
    scheduler, sizes = Scheduler(geometry, largest=4, split_backward=False), iter([3, 4, None])
    executor = rank_of(
        network_of(FIRST, depth=3), scheduler=scheduler, timer=timer, sizes_agree=agree,
        count_tokens=lambda _: next(sizes),
    )  # fmt: skip
    executor.run()
    assert scheduler.sizes.known == ([3, 4, None] if agree else [None] * 3)
    assert timer.told == [("F", 0.75 if agree else 1.0), ("F", 1.0), ("F", 1.0)]
    assert executor.first_size == 3, "what was measured has a size all the same"


def test_slices_of_one_row_are_timed_by_their_keys() -> None:
    """The timer took a row's slices as equally long, and waited too long for the short ones."""
    units, timer = (Unit(0, 0, 32, 64), Unit(0, 32, 64, 64)), Noting()
    shares = [1.0 + each.earlier_keys / 32 for each in units]
    scheduler = Scheduler(Geometry(1, 0, 1, 2, groups=(2,)), cap=8)
    rank_of(
        FakeNetwork([]), scheduler=scheduler, timer=timer,
        topology=Topology((0,), 0, 1), longer={"F": shares, "B": [3 * each for each in shares]},
    ).run()  # fmt: skip
    found = {kind: [size for each, size in timer.told if each == kind] for kind in "FBW"}
    assert found == {"F": [1.0, 2.0], "B": [6.0, 3.0], "W": [1.0, 1.0]}


@pytest.mark.parametrize("declared", [1, 2])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_as_many_tensors_are_sent_as_were_declared(
    monkeypatch: pytest.MonkeyPatch, number: int, declared: int
) -> None:
    """A neighbour that waits for another one would wait for ever."""
    sends = [4] * declared
    monkeypatch.setattr(Arithmetic, "spread", lambda *_: [torch.zeros(1)] * number)
    executor = rank_of(network_of(FIRST, sends), Geometry(2, 0, 1, 1, **EVALUATION), sends=sends)
    refused = pytest.raises(TypeError, match=f"to its neighbour; {declared} Tensors? declared")
    with refused if number != declared else nullcontext():
        executor.run()


# Missing senders ----------------------------------------------------------------------------------

MIDDLE = Topology((0, 1, 2), 1, 1)
LEFT: list[tuple[Geometry, dict[str, Any], int, int, str, list[str]]] = [
    # geometry, further arguments, messages of rank 0, rank that leaves, words, tasks before
    (Geometry(2, 1, 1, 2), {"timeout": 600.0}, 0, 0, "rank 0 has closed its transport", []),
    (TWO, {"number": 3, "consumed": [6]}, 0, 0, "microbatch 0 of iteration 3 .*has closed", []),
    (TWO, {"number": 3, "consumed": [6]}, 1, 0, "microbatch 1 of iteration 3 .*has closed",
     ["0F0"]),
    (Geometry(2, 1, 2, 2, **EVALUATION), {}, 2, 0, r"microbatch 0 of .* \(forward of chunk 1",
     ["0F0", "0F1"]),
    (Geometry(2, 0, 1, 2), {}, 0, 1, r"microbatch 0 of iteration 0 \(backward of chunk 0",
     ["0F0", "0F1"]),
    # with Megatron's order a forward may run, and the next task is a backward
    (Geometry(2, 0, 1, 8), {"policy": "megatron"}, 0, 1, "rank 1 has closed", ["0F0", "0F1"]),
    (Geometry(3, 1, 1, 4), {"topology": MIDDLE}, 1, 2, r"microbatch 0 .* \(backward of chunk 0",
     ["0F0"]),
]  # fmt: skip


@pytest.mark.parametrize(("geometry", "more", "sent", "leaves", "words", "tasks"), LEFT)
def test_a_sender_that_left_is_named_with_the_message_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry, more: dict[str, Any], sent: int,
    leaves: int, words: str, tasks: list[str],
) -> None:  # fmt: skip
    """At once, of any chunk and direction, whoever else is alive. Messages of earlier iterations
    are no messages of this one.
    """
    topology = more.get("topology", Topology((0, 1), geometry.rank, geometry.num_chunks))
    network, before = network_of(topology), more.get("consumed", [0])[0]
    if sent:
        outgoing = network.transport(0).outgoing
        first = next(i for i, spec in enumerate(outgoing) if spec.chunk == 0)
        put(network, sent, iteration=more.get("number", 0), channel=first)
    network.transport(leaves).close()
    poll = FakeTransport.poll
    monkeypatch.setattr(FakeTransport, "poll", lambda own: [before + n for n in poll(own)])
    executor = rank_of(network, geometry, **{"timeout": 2.0} | more)
    with pytest.raises(PeerDead, match=words):
        executor.run()
    assert ran(executor) == tasks


def test_the_last_messages_of_a_sender_that_left_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come with the farewell, after the look at the channels and before that at it."""
    network = network_of(LAST)
    put(network, 2)
    network.transport(0).close()
    executor = rank_of(network, TWO, timeout=2.0)
    executor.run()
    network = network_of(LAST)
    late = rank_of(network, TWO, timeout=2.0)

    def departed(own: FakeTransport, peer: int) -> bool:
        if not late.actions and not own.poll()[0]:
            put(network, 2)
        return True

    monkeypatch.setattr(FakeTransport, "departed", departed)
    late.run()
    assert len(executor.actions) == len(late.actions) == 2


# Time ---------------------------------------------------------------------------------------------


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Every sleep: the seconds asked for, and whether something ended it."""
    made: list[tuple[float, bool]] = []
    wait = FakeTransport.wait

    def noted(own: FakeTransport, seconds: float) -> bool:
        ended = wait(own, seconds)
        made.append((seconds, ended))
        return ended

    monkeypatch.setattr(FakeTransport, "wait", noted)
    return made


def forwards_alone(view: View) -> Action | None:
    """A policy that runs no backward, and so waits for what its neighbour sends after one."""
    return view.first_forward()


BREADTH = {"geometry": Geometry(2, 0, 1, 30), "policy": "breadth-first", "cap": 30}
TIMID = {"geometry": Geometry(2, 1, 1, 2), "policy": forwards_alone}
LATE: list[tuple[dict[str, Any], float, float, int, str | None, float]] = [
    # arguments of the rank, delay, timeout, messages, words or None, seconds at the end
    ({"geometry": TWO}, 9.9, 10.0, 1, "could run nothing for 10 s in iteration 0", 19.9),
    ({"geometry": TWO}, 9.99, 10.0, 2, None, 9.99),
    ({"geometry": TWO}, 9.9, 9.0, 1, r"missing from: .*\(?forward of chunk 0, rank 0 -> 1", 9.0),
    ({"geometry": THIRTY}, 0.0, 3.0, 0, "receivers are alive but take nothing", 3.0),
    (BREADTH, 0.0, 1.0, 0, "could run nothing", 1.0),
    (TIMID, 0.0, 1.0, 1, "or the policy waits for messages", 1.0),
]


@pytest.mark.parametrize(("given", "delay", "timeout", "sent", "words", "end"), LATE)
def test_the_deadline_is_the_timeout_after_the_last_task(
    clock: VirtualClock, naps: list[tuple[float, bool]], given: dict[str, Any], delay: float,
    timeout: float, sent: int, words: str | None, end: float,
) -> None:  # fmt: skip
    """A rank sleeps at most 50 ms at a time, one that is full 1 ms, as its receiver frees slots
    without waking it. One that trains is woken by its gradients although as much waits to leave.
    """
    topology = FIRST if not sent else LAST
    more = {"delay": lambda *_: delay, "clock": clock, "stepping": True}
    network = network_of(topology, **more)
    put(network, sent)
    executor = rank_of(network, timeout=timeout, **given)
    with pytest.raises(TransferTimeout, match=words) if words else nullcontext():
        executor.run()
    assert end <= clock.now() - 1000.0 < end + 0.1
    assert max(seconds for seconds, _ in naps) == (0.001 if end == 3.0 else 0.05)
    assert min(seconds for seconds, _ in naps) > 0.0


ORDER = ["0F0", "0B0", "0F1", "0B1"]
FIXED: list[tuple[dict[str, Any], list[str], int]] = [
    ({"policy": "megatron"}, ORDER, 2), ({"geometry": TWO}, ["0F0", "0F1"], 2),
    ({"policy": "dynamic", "split_backward": True}, ["0F0"], 1), ({"policy": "dynamic"}, ORDER, 0),
    ({"policy": "megatron", "split_backward": True}, ORDER[:2], 1),
]  # fmt: skip


@pytest.mark.parametrize("fate", ["stays", "moves", "dies"])
@pytest.mark.parametrize(("given", "tasks", "ahead"), FIXED)
def test_tasks_are_launched_ahead_of_several_inputs_where_their_order_is_fixed(
    clock: VirtualClock, given: dict[str, Any], tasks: list[str], ahead: int, fate: str
) -> None:
    """Also with fused backwards. The oldest input is named, timed since the one before has come."""
    moves, dies = fate == "moves" and ahead > 1, fate == "dies"
    late = {"delay": lambda _, __, n: 0.05 * (n + 1), "clock": clock, "stepping": True}
    network, timer = network_of(LAST, ahead=True, **late), NeverStarts()
    put(network, 2, iteration=5)
    timer.pause = lambda: 0.0 if ahead < 2 else pytest.fail("it waits")  # type: ignore[method-assign]

    def waiting() -> int:
        if dies:
            network.kill(0)
        return timer.num_ahead - (moves and clock.now() > 1000.15)

    timer.waiting = waiting  # type: ignore[method-assign]
    given = {"geometry": Geometry(2, 1, 1, 2), "timer": timer, "number": 5} | given
    executor = rank_of(network, timeout=0.2, **given)
    text = "rank 0 died" if dies else rf"microbatch {moves:d} of iteration 5 .*chunk 0, rank 0 -> 1"
    with pytest.raises((TransferTimeout, PeerDead), match=text) if ahead else nullcontext():
        executor.run()
    assert (tasks[:2] if dies and ahead > 1 else tasks) == ran(executor)
    assert not moves or clock.now() > 1000.35


def test_an_iteration_ends_when_its_outputs_have_left_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed: list[tuple[float, int]] = []
    executor = rank_of(network_of(FIRST), Geometry(2, 0, 1, 3, **EVALUATION), timeout=7.0)
    monkeypatch.setattr(
        FakeTransport, "flush", lambda _, seconds: flushed.append((seconds, len(executor.actions)))
    )
    executor.run()
    assert flushed == [(7.0, 3)]


def test_a_backlog_may_take_longer_than_the_timeout(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout applies only to sends that make no progress."""
    network = network_of(FIRST, clock=clock, stepping=True)
    receiver = network.transport(1)

    def takes_one(own: FakeTransport, seconds: float) -> bool:
        clock.advance_to(clock.now() + 0.9 * seconds)
        return receiver.take(0).iteration == 0

    monkeypatch.setattr("megatron.dpp.runtime.mail.MOST_PENDING", 1000)
    monkeypatch.setattr(FakeTransport, "wait", takes_one)
    rank_of(network, THIRTY, timeout=1.0).run()
    assert clock.now() > 1020.0


def test_what_arrives_ends_a_sleep(
    monkeypatch: pytest.MonkeyPatch, naps: list[tuple[float, bool]]
) -> None:
    network, poll, sent = network_of(LAST), FakeTransport.poll, list[int]()

    def then_arrives(own: FakeTransport) -> Sequence[int]:
        arrived = poll(own)
        if not sent:
            sent.append(0)
            put(network, 2)
        return arrived

    monkeypatch.setattr(FakeTransport, "poll", then_arrives)
    rank_of(network, TWO).run()
    assert naps == [(0.05, True)]


class Late(TaskTimer):
    """A device that is busy at four looks and has an input at the tenth; keeps looks by task."""

    looks, pauses = 0, 0

    def pause(self) -> float:
        self.pauses += 1
        return 0.0 if self.pauses > 4 else 0.1

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[int] = []

    def begin(self, *, ahead: bool = False) -> None:
        super().begin(ahead=ahead)
        self.begins.append(self.looks)

    def waiting(self) -> bool:
        self.looks += 1
        return self.looks < 10


def test_a_rank_rests_between_looks_at_its_device_and_chooses_nothing_meanwhile(
    clock: VirtualClock, naps: list[tuple[float, bool]]
) -> None:
    """A loop that polls without sleeping keeps the interpreter from a data loader's thread. An
    arrival that nobody looks at would end every later rest at once.
    """
    network = network_of(LAST, delay=lambda *_: 0.5, clock=clock, stepping=True, ahead=True)
    put(network, 2)
    timer = Late()
    rank_of(network, Geometry(2, 1, 1, 2), split_backward=True, timer=timer).run()
    assert timer.begins[:2] == [0, 10]
    rests = [ended for seconds, ended in naps if seconds < 1e-4]
    assert len(rests) == 9 and rests.count(True) <= 1
    assert [seconds for seconds, _ in naps[:5]] == [*[1e-3] * 4, 5e-5]


def test_no_cause_is_told_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence per gap took longer than the decision."""
    monkeypatch.setattr(Scheduler, "stall", lambda own: pytest.fail("nobody reads it"))
    check_values(run_pipeline(2, 2, 4, delay=0.001), 4)


# Mail ---------------------------------------------------------------------------------------------


def mail_of(size: int = 4) -> tuple[Mail, FakeTransport]:
    """The mail of the first of two ranks, whose messages have ``size`` bytes."""
    transport = FakeNetwork(list(FIRST.channels([size], [size], 2))).transport(0)
    return Mail(Links(transport, FIRST), NullRecorder(), 0, 1.0), transport


@pytest.mark.parametrize(
    ("cause", "followed", "named"),
    [(Cause.POLICY, False, True), (Cause.POLICY, True, False), (Cause.MEMORY_CAP, False, False)],
)
def test_a_policy_is_suspected_where_it_alone_waits(
    cause: Cause, followed: bool, named: bool
) -> None:
    """A follower's leader decides; under a cap no policy could do otherwise."""
    text = str(mail_of()[0].stalled(Stall(cause, "the reason"), followed=followed))
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


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, ["ran", "size", "early"]), (1, ["size", "early", "ran"])]
)
def test_the_next_task_is_decided_early_only_behind_the_size_of_this_one(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]
) -> None:
    """A leader that decided before a first stage's F told its size left its followers behind."""
    seen: list[str] = []
    network = network_of(FIRST if rank == 0 else LAST)
    if rank == 1:
        put(network, 1)
    forward = Arithmetic.forward
    monkeypatch.setattr(Arithmetic, "forward", lambda *given: seen.append("ran") or forward(*given))
    monkeypatch.setattr(Decider, "look_ahead", lambda own: seen.append("early"))
    count = lambda _: seen.append("size")  # noqa: E731
    rank_of(network, Geometry(2, rank, 1, 1, **EVALUATION), count_tokens=count).run()
    assert seen == expected
