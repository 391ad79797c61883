"""The gaps, tasks, messages and costs that the executor tells, one rank at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import megatron.dpp.runtime.gaps as clocked
from megatron.dpp.inject import Task
from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.runtime.gaps import Gaps
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, Scheduler
from megatron.dpp.trace import Recorder
from tests.fake_network import FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import FIRST, LAST, Arithmetic, network_of, put, rank_of
from tests.runtime.test_executor_contract import TWO


class Log(Recorder):
    """Keeps what it is told."""

    enabled = True

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int, str, str]] = []
        self.events: list[str] = []

    def mark(self) -> int:
        return int(clocked.time.monotonic() * 1e9)

    def begin_task(self, kind: str, chunk: int, microbatch: int, piece: int = 0) -> None:
        self.events.append(f"{chunk}{kind}{microbatch}")

    def end_task(self) -> None:
        self.events.append("end")

    def gap(self, start: Any, end: Any, cause: str, detail: str = "") -> None:
        self.gaps.append((start, end, cause, detail))
        self.events.append("gap")

    def put(self, channel: object, microbatch: int, num_bytes: int, kind: str) -> None:
        self.events.append(f"put {microbatch} {num_bytes} {kind}")

    def taken(self, channel: object, message: Any, *, ahead: bool = False) -> None:
        self.events.append(f"taken {message.microbatch}{' ahead' * ahead}")

    def counter(self, name: str, value: float) -> None:
        if name == "held":
            self.events.append(f"held {value:g}")


@pytest.mark.parametrize("ahead", [True, False])
def test_gaps_last_from_the_first_idle_look_to_the_task(clock: VirtualClock, ahead: bool) -> None:
    """One gap per wait, with the tasks that would have run; it ends before its task begins."""
    late: dict[str, Any] = {"delay": lambda _, __, n: 2.0 * (n + 1), "clock": clock}
    network = network_of(LAST, stepping=True, ahead=ahead, **late)
    put(network, 2)
    log = Log()
    rank_of(network, TWO, recorder=log).run()
    seconds = [(a * 1e-9 - 1000, b * 1e-9 - 1000, *rest) for a, b, *rest in log.gaps]
    assert seconds == [
        (pytest.approx(0.0, abs=1e-6), pytest.approx(2.0), "warm-up", "F0"),
        (pytest.approx(2.0), pytest.approx(4.0), "message", "F0"),
    ]
    begin = ["taken 0 ahead", "gap", "0F0"] if ahead else ["gap", "0F0", "taken 0"]
    once = [*begin, "end", "held 0"]
    assert log.events == once + [e.replace("F0", "F1").replace("n 0", "n 1") for e in once]


def test_a_fused_backwards_output_leaves_before_the_pieces_of_its_weight_gradient() -> None:
    """They are recorded as tasks, are no decisions, and complete the chunk."""
    network = network_of(LAST)
    put(network, 2)
    log = Log()
    runner, geometry = Arithmetic(LAST), Geometry(2, 1, 1, 2, w_pieces=(2,))
    scheduler = Scheduler(geometry, cap=8, stock=0)
    executor = rank_of(network, runner=runner, recorder=log, scheduler=scheduler)
    executor.run()
    assert list(map(str, executor.actions)) == ["0F0", "0B0", "0F1", "0B1"]
    weights = ["0W0", "end", "held 0"]
    once = ["0B0", "end", "held 0", "put 0 4 fake", *weights, *weights]
    begin = log.events.index("0B0")
    assert log.events[begin : begin + len(once)] == once
    assert [entry for entry in runner.log if entry[0] == "W"] == [
        ("W", 0, microbatch, piece) for microbatch in (0, 1) for piece in (0, 1)
    ]
    assert runner.complete == [0] and runner.complete_after == [8]


def test_pieces_of_a_w_are_recorded_one_by_one_and_timed_together() -> None:
    """With what is held after each of them."""

    class Noting(TaskTimer):
        told: ClassVar[list[Any]] = []

        def goes_on(self, key: tuple[str, int], size: float, number: int) -> bool:
            self.told.append(number)
            return True

        def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
            self.told.append((key[0], number))

    network, log = network_of(LAST), Log()
    put(network, 1)
    geometry = Geometry(2, 1, 1, 1, w_pieces=(3,))
    rank_of(network, geometry, recorder=log, timer=Noting(), split_backward=True).run()
    each = [("0W0", "end", f"held {held}") for held in ("0.666667", "0.333333", "0")]
    assert log.events[log.events.index("0W0") :] == [event for piece in each for event in piece]
    assert Noting.told == [("F", 1), ("B", 1), 1, 2, 3, ("W", 3)]


def test_a_wait_behind_a_task_becomes_one_for_an_input(clock: VirtualClock) -> None:
    class Busy(TaskTimer):
        pauses: ClassVar = [1.0, 1.0]

        def pause(self) -> float:
            return self.pauses.pop() if self.pauses else 0.0

    network = network_of(LAST, delay=lambda *_: 0.5, clock=clock, stepping=True)
    put(network, 1)
    log = Log()
    rank_of(network, Geometry(2, 1, 1, 1), recorder=log, timer=Busy()).run()
    assert [gap[2:] for gap in log.gaps] == [("lookahead", ""), ("warm-up", "F0")]


def gaps_of(recorder: Recorder) -> Gaps:
    return Gaps(recorder, Decider(Scheduler(TWO), Links(network_of(LAST).transport(1), LAST)))


def test_a_gap_keeps_its_first_cause_unless_that_was_the_lookahead(clock: VirtualClock) -> None:
    log = Log()
    gaps = gaps_of(log)
    for moment, cause in enumerate(("lookahead", "lookahead", "message", "lookahead", "warm-up")):
        clock.advance_to(1000.0 + moment)
        gaps.open(cause, f"since {moment}")
    clock.advance_to(1005.0)
    gaps.close()
    gaps.close()
    clock.advance_to(1006.0)
    gaps.open("warm-up")
    clock.advance_to(1008.0)
    gaps.close()
    seconds = [(a // 10**9 - 1000, b // 10**9 - 1000, *rest) for a, b, *rest in log.gaps]
    assert seconds == [
        (0, 2, "lookahead", "since 0"), (2, 5, "message", "since 2"), (6, 8, "warm-up", ""),
    ]  # fmt: skip


def test_a_message_is_recorded_before_it_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast copy would arrive before it was sent."""
    log, network = Log(), network_of(FIRST)
    executor = rank_of(network, Geometry(2, 0, 1, 1, forward_only=True), recorder=log)
    real = FakeTransport.put

    def noted(*given: Any, **more: Any) -> None:
        log.events.append("really")
        real(*given, **more)

    monkeypatch.setattr(FakeTransport, "put", noted)
    executor.run()
    assert log.events == ["0F0", "end", "held 0", "put 0 4 fake", "really"]


def test_a_gap_has_a_part_for_each_delay_of_another_member_and_one_deadline(
    clock: VirtualClock,
) -> None:
    log = Log()
    gaps = gaps_of(log)
    causes = ("warm-up", "message", "late-member", "late-member", "late-leader", "message")
    for moment, cause in enumerate(causes):
        clock.advance_to(1000.0 + moment)
        gaps.open(cause)
    assert gaps.seconds == pytest.approx(5.0)
    gaps.close()
    assert [cause for _, _, cause, _ in log.gaps] == [
        "warm-up", "late-member", "late-leader", "message",
    ]  # fmt: skip
    assert all(one[1] == other[0] for one, other in pairwise(log.gaps))


# Costs --------------------------------------------------------------------------------------------


class Injected:
    """Injects nothing, and keeps what it is asked for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def factor(self, task: Task) -> float:
        self.tasks.append(task)
        return 1.0

    def seconds(self, task: Task) -> float:
        return 0.0


COSTS = {"0F": 0.5, "0B": 0.5, "0W": 0.25, "1F": 0.5, "1B": 1.0}


@pytest.mark.parametrize(
    ("pieces", "stock", "costs"),
    [(None, math.inf, COSTS | {"0B": 1.0}), ((2, 0), math.inf, COSTS), ((2, 0), 0, COSTS)],
)
def test_the_work_of_a_rank_is_three_forwards_per_microbatch(
    pieces: tuple[int, ...] | None, stock: float, costs: dict[str, float]
) -> None:
    """Delays that depend on the work done so far are the same in all schedules."""
    topology, injected, split = Topology((0,), 0, 2), Injected(), pieces is not None
    geometry = Geometry(1, 0, 2, 2, w_pieces=pieces)
    scheduler = Scheduler(geometry, cap=8, split_backward=split, stock=stock)
    rank_of(
        network_of(topology), scheduler=scheduler, topology=topology, injector=injected,
        number=5,
    ).run()  # fmt: skip
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

    clock = SimpleNamespace(perf_counter_ns=lambda: now)
    monkeypatch.setattr("megatron.dpp.runtime.executor.time", clock)
    topology, injected = Topology((0,), 0, 1), Injected()
    runner: Any = Arithmetic(topology)
    for owner, name, nanoseconds in (
        (injected, "factor", 50_000), (runner, "forward", 1_000), (runner, "backward", 1_000),
        (Decider, "next", 7),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, takes(nanoseconds, getattr(owner, name)))
    executor = rank_of(
        FakeNetwork([]), Geometry(1, 0, 1, 3), runner=runner, topology=topology,
        injector=injected if injects else None,
    )  # fmt: skip
    executor.run()
    assert executor.overhead_ns == 6 * 7
