"""The gaps, tasks and messages that the executor records, one rank at a time."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.report.reader import read_events, read_header
from megatron.dpp.schedule import Geometry
from megatron.dpp.trace import NullRecorder, Recorder, TraceLayout, open_recorder
from megatron.dpp.transport.fake import FakeTransport, VirtualClock
from tests.runtime.test_executor_contract import LAST, network_of, put, rank_of


class Log(Recorder):
    """Keeps what it is told."""

    enabled = True

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int, str, str]] = []
        self.events: list[str] = []

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


def test_gaps_last_from_the_first_idle_look_to_the_task(clock: VirtualClock) -> None:
    """One gap per wait, with the tasks that would have run; it ends before its task begins."""
    network = network_of(1, delay=lambda _, __, n: 2.0 * (n + 1), clock=clock, stepping=True)
    put(network, 2)
    log = Log()
    rank_of(network, LAST, recorder=log).run()
    seconds = [(a * 1e-9 - 1000, b * 1e-9 - 1000, *rest) for a, b, *rest in log.gaps]
    assert seconds == [
        (pytest.approx(0.0, abs=1e-6), pytest.approx(2.0), "warm-up", "F0"),
        (pytest.approx(2.0), pytest.approx(4.0), "message", "F0"),
    ]
    once = ["gap", "0F0", "taken 0", "end", "held 0"]
    assert log.events == once + [e.replace("F0", "F1").replace("n 0", "n 1") for e in once]


def test_a_gap_keeps_its_first_cause_unless_that_was_the_lookahead(clock: VirtualClock) -> None:
    log = Log()
    executor = rank_of(network_of(1, clock=clock, stepping=True), LAST, recorder=log)
    for moment, cause in enumerate(("lookahead", "lookahead", "message", "lookahead", "warm-up")):
        clock.advance_to(1000.0 + moment)
        executor._open_gap(cause, f"since {moment}")
    clock.advance_to(1005.0)
    executor._close_gap()
    executor._close_gap()
    clock.advance_to(1006.0)
    executor._open_gap("warm-up")
    clock.advance_to(1008.0)
    executor._close_gap()
    seconds = [(a // 10**9 - 1000, b // 10**9 - 1000, *rest) for a, b, *rest in log.gaps]
    assert seconds == [
        (0, 2, "lookahead", "since 0"), (2, 5, "message", "since 2"), (6, 8, "warm-up", ""),
    ]  # fmt: skip


def test_a_trace_file_has_the_gaps_between_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks, gaps and arrivals of a rank in the file: no gap overlaps a task, and each ends with
    the arrival that it waited for.
    """
    layout = TraceLayout(
        data=0, pipeline=1, tensor=0, data_size=1, pipeline_size=2, tensor_size=1, num_chunks=1
    )
    network, microbatches = network_of(1), iter(range(2))

    def wait(own: FakeTransport, seconds: float) -> bool:
        time.sleep(0.02)
        network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=next(microbatches))
        return True

    monkeypatch.setattr(FakeTransport, "wait", wait)
    with open_recorder(tmp_path, rank=1, layout=layout) as recorder:
        executor = rank_of(network, LAST, recorder=recorder, iteration=0)
        recorder.begin_iteration(0)
        executor.run()
        recorder.end_iteration()
    file = read_header(layout.path(tmp_path))
    events = [e for e in read_events(file) if e.get("cat") in ("task", "wait", "arrival")]
    spans = {e["name"]: (file.time_ns(e), file.time_ns(e) + file.duration_ns(e)) for e in events}
    assert set(spans) == {
        "0F0", "0F1", "wait: warm-up", "wait: message", "arrival 0", "arrival 1"
    }  # fmt: skip
    details = {e["name"]: e["args"].get("detail") for e in events if e["cat"] == "wait"}
    assert details == {"wait: warm-up": "F0", "wait: message": "F0"}
    microsecond = 1000
    for gap, task, number in (("wait: warm-up", "0F0", 0), ("wait: message", "0F1", 1)):
        begin, end = spans[gap]
        assert end - begin > 10**7
        assert begin < spans[f"arrival {number}"][0] <= end + microsecond
        assert end <= spans[task][0] + microsecond
    assert spans["0F0"][1] <= spans["wait: message"][0] + microsecond


def test_a_message_is_recorded_before_it_is_put() -> None:
    """A fast copy would arrive before it was sent."""
    log, network = Log(), network_of(0)
    executor = rank_of(network, Geometry(2, 0, 1, 1, forward_only=True), recorder=log)
    transport: Any = executor._transport
    real = transport.put

    def noted(*given: Any, **more: Any) -> None:
        log.events.append("really")
        real(*given, **more)

    transport.put = noted
    executor.run()
    assert log.events == ["0F0", "end", "held 0", "put 0 4 fake", "really"]


class Gaps(NullRecorder):
    """Keeps the causes of gaps, which must follow each other without a hole."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, str]] = []

    def gap(self, start: Any, end: Any, cause: str, detail: str = "") -> None:
        self.found.append((start, end, cause))


def test_a_gap_has_a_part_for_each_delay_of_another_member_and_one_deadline() -> None:
    gaps = Gaps()
    executor = rank_of(network_of(1), LAST, recorder=gaps)
    executor._open_gap("warm-up")
    began = executor._gap_start
    for cause in ("message", "late-member", "late-member", "late-leader", "message"):
        executor._open_gap(cause)
    executor._close_gap()
    assert [cause for _, _, cause in gaps.found] == [
        "warm-up", "late-member", "late-leader", "message",
    ]  # fmt: skip
    assert gaps.found[0][0] == began == executor._gap_start
    assert all(one[1] == other[0] for one, other in pairwise(gaps.found))
