"""The executor's sleeps while nothing can run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.dpp.errors import TransferTimeout
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.schedule import Geometry, Scheduler
from tests.fake_network import FakeTransport, VirtualClock
from tests.runtime.pipelines import check_values, run_pipeline
from tests.runtime.test_executor_contract import LAST, network_of, put, rank_of


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


class Late(HostTimer):
    """A device that has the input of the last task at the tenth look."""

    looks = 0

    def waiting(self) -> bool:
        self.looks += 1
        return self.looks < 10


def test_a_rank_rests_between_looks_at_its_device_whatever_has_arrived(
    clock: VirtualClock, naps: list[tuple[float, bool]]
) -> None:
    """An arrival that nobody looks at would end every later rest at once."""
    network = network_of(1, delay=lambda *_: 0.5, clock=clock, stepping=True, ahead=True)
    put(network, 1)
    timer = Late()
    rank_of(network, Geometry(2, 1, 1, 1, forward_only=True), timer=timer).run()
    rests = [ended for seconds, ended in naps if seconds < 1e-4]
    assert len(rests) == 9 and rests.count(True) <= 1


class NotesBegins(Late):
    """Keeps how often it was looked at before each task."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[int] = []

    def begin(self, *, ahead: bool = False) -> None:
        super().begin(ahead=ahead)
        self.begins.append(self.looks)


def test_no_task_is_chosen_while_the_device_waits_for_an_input(clock: VirtualClock) -> None:
    network = network_of(1, delay=lambda *_: 0.5, clock=clock, stepping=True, ahead=True)
    put(network, 2)
    timer = NotesBegins()
    rank_of(network, LAST, timer=timer).run()
    assert timer.begins == [0, 10]


def test_a_rank_that_is_full_looks_for_a_free_slot_more_often(
    clock: VirtualClock, naps: list[tuple[float, bool]]
) -> None:
    """Its receiver frees slots without waking it; an arrival does wake it."""
    network = network_of(0, clock=clock, stepping=True)
    with pytest.raises(TransferTimeout):
        rank_of(network, Geometry(2, 0, 1, 30, forward_only=True), timeout=1.0).run()
    assert naps[0] == (0.001, False)


def test_a_rank_that_trains_is_woken_by_its_gradients(
    clock: VirtualClock, naps: list[tuple[float, bool]]
) -> None:
    """Although as much waits to leave."""
    network, geometry = network_of(0, clock=clock, stepping=True), Geometry(2, 0, 1, 30)
    scheduler = Scheduler(geometry, policy="breadth-first", cap=30, split_backward=False)
    with pytest.raises(TransferTimeout, match="could run nothing"):
        rank_of(network, geometry, scheduler=scheduler, timeout=1.0).run()
    assert naps[0] == (0.05, False)


def test_what_arrives_ends_a_sleep(
    monkeypatch: pytest.MonkeyPatch, naps: list[tuple[float, bool]]
) -> None:
    network, poll, sent = network_of(1), FakeTransport.poll, list[int]()

    def then_arrives(own: FakeTransport) -> Sequence[int]:
        arrived = poll(own)
        if not sent:
            sent.append(0)
            put(network, 2)
        return arrived

    monkeypatch.setattr(FakeTransport, "poll", then_arrives)
    rank_of(network, LAST).run()
    assert naps == [(0.05, True)]


def test_a_backlog_may_take_longer_than_the_timeout(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout applies only to sends that make no progress."""
    network = network_of(0, clock=clock, stepping=True)
    receiver = network.transport(1)

    def takes_one(own: FakeTransport, seconds: float) -> bool:
        clock.advance_to(clock.now() + 0.9 * seconds)
        return receiver.take(0).iteration == 0

    monkeypatch.setattr("megatron.dpp.runtime.mail.MOST_PENDING", 1000)
    monkeypatch.setattr(FakeTransport, "wait", takes_one)
    rank_of(network, Geometry(2, 0, 1, 30, forward_only=True), timeout=1.0).run()
    assert clock.now() > 1020.0


def test_no_cause_is_told_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence per gap took longer than the decision."""
    monkeypatch.setattr(Scheduler, "stall", lambda own: pytest.fail("nobody reads it"))
    check_values(run_pipeline(2, 2, 4, delay=0.001), 4)
