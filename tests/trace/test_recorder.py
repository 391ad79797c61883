"""The recorder's file of a run that is whole, cut short, or records few iterations."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.report.reader import open_run, read_events
from megatron.dpp.trace import (
    NullRecorder,
    Recorder,
    TraceLayout,
    open_recorder,
    parse_iterations,
    writer,
)
from megatron.dpp.trace.schema import TASK_TRACK
from megatron.dpp.trace.writer import TraceWriter
from tests.report.synthetic import Channel

LAYOUT = TraceLayout(
    data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1, num_chunks=2
)
CHANNEL = Channel(0, 1, 1, 0)


class Taken:
    iteration = 4
    microbatch = 2
    part = 0

    def __init__(self, sent_ns: int, arrived_ns: int) -> None:
        self.sent_ns, self.arrived_ns = sent_ns, arrived_ns


class Pool:
    """A device's clock with few events."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size))

    def mark(self) -> tuple[int, int] | None:
        return (self.free.pop(), 1) if self.free else None

    def resolve(self, mark: tuple[int, int]) -> int:
        self.free.append(mark[0])
        return 5

    def discard(self, mark: tuple[int, int]) -> None:
        self.free.append(mark[0])

    def peak_memory(self) -> int:
        return 0


def test_events_that_are_dropped_give_their_marks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no CUDA event is left to time the tasks after a long stall."""
    pool = Pool(10)
    monkeypatch.setattr("megatron.dpp.trace.recorder.clock_for", lambda device: pool)
    monkeypatch.setattr("megatron.dpp.trace.recorder.QUEUE_EVENTS", 0)
    recorder = open_recorder(tmp_path, rank=0, layout=LAYOUT)
    recorder.begin_iteration(0)
    for microbatch in range(20):
        recorder.begin_task("F", 0, microbatch)
        recorder.end_task()
    assert len(pool.free) == 9, "the iteration's start is marked"
    monkeypatch.setattr("megatron.dpp.trace.recorder.QUEUE_EVENTS", 100)
    recorder.begin_task("F", 0, 20)
    recorder.end_task()
    recorder.end_iteration()
    recorder.close()
    assert len(pool.free) == 10
    (file,) = open_run(tmp_path)
    assert [event["args"]["microbatch"] for event in read_events(file, ("task",))] == [20]


def test_events_that_the_device_never_reaches_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(
        monotonic=lambda: next(seconds), monotonic_ns=time.monotonic_ns, sleep=lambda _: None
    )
    monkeypatch.setattr(writer, "time", clock)
    pool = Pool(100)
    monkeypatch.setattr(pool, "resolve", lambda mark: None)
    monkeypatch.setattr("megatron.dpp.trace.recorder.clock_for", lambda device: pool)
    recorder = open_recorder(tmp_path, rank=0, layout=LAYOUT)
    recorder.begin_iteration(0)
    recorder.counter("held", 1)
    for microbatch in range(3):
        recorder.begin_task("F", 0, microbatch)
        recorder.end_task()
    recorder.close()
    last = json.loads(LAYOUT.path(tmp_path).read_text())[-1]
    assert last["name"] == "end" and last["args"]["dropped"] == 3
    assert [event["cat"] for event in events_of(tmp_path)] == ["counter"]


class Marks:
    """A device's clock of which ``times`` knows some marks; a mark is a tuple of its name."""

    def __init__(self, **times: int) -> None:
        self.times = times
        self.given_back: list[str] = []

    def resolve(self, mark: tuple[str]) -> int | None:
        return self.times.get(mark[0])

    def discard(self, mark: tuple[str]) -> None:
        self.given_back.append(mark[0])


def task(microbatch: int, start: object, end: object) -> tuple[object, ...]:
    return ("task", start, end, 0, "F", 0, microbatch, 0)


class ByHand:
    """The thread of a writer, which runs when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._waits: Iterator[bool] = iter(())
        self._stopped = False
        threads = SimpleNamespace(Thread=self._thread, Event=self._event)
        monkeypatch.setattr(writer, "threading", threads)

    def _thread(self, target: Callable[[], None], **_: object) -> object:
        self._target = target
        return SimpleNamespace(start=lambda: None, join=lambda: None)

    def _event(self) -> object:
        def stop() -> None:
            self._stopped = True

        return SimpleNamespace(
            wait=lambda _: next(self._waits), is_set=lambda: self._stopped, set=stop
        )

    def drain(self) -> None:
        self._waits = iter([False, True])
        self._target()


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    return ByHand(monkeypatch)


def test_an_event_without_both_of_its_times_is_dropped_and_gives_back_what_it_has(
    tmp_path: Path, thread: ByHand
) -> None:
    start = time.monotonic_ns()
    marks = Marks(b=start + 1, f=start + 2_000, g=start + 3_000)
    events = [
        task(0, ("a",), None),
        task(1, None, ("b",)),
        task(2, None, None),
        task(3, ("e",), ("f",)),  # the end's mark is used up, the start's is not
        task(4, start, ("g",)),
        task(5, 7, None),
    ]
    queue: deque[tuple[object, ...]] = deque(events)
    made = TraceWriter(
        tmp_path / "x.json", queue, marks, rank=0, layout=LAYOUT, device="d", run="r"
    )  # type: ignore[arg-type]
    thread.drain()
    assert made.dropped == 5 and not queue
    assert marks.given_back == ["a", "b", "e"]
    made.close()
    _, *found, last = json.loads((tmp_path / "x.json").read_text())
    assert [event["args"]["microbatch"] for event in found] == [4]
    assert last["args"]["dropped"] == 5


def record_iteration(recorder: Recorder, iteration: int) -> None:
    recorder.begin_iteration(iteration)
    start = time.monotonic_ns()
    recorder.gap(start - 1000, start, "message", "F1")
    recorder.begin_task("F", 1, 2)
    recorder.put(CHANNEL, 2, 4096, "shm")
    recorder.end_task()
    recorder.taken(CHANNEL, Taken(start - 500, start - 200), ahead=True)
    recorder.counter("held", 3)
    with recorder.span("optimizer"):
        pass
    recorder.end_iteration()


def events_of(directory: Path) -> list[dict]:
    (file,) = open_run(directory)
    return list(read_events(file))


def test_every_kind_of_event_is_written_and_read_back(tmp_path):
    with open_recorder(tmp_path, rank=0, layout=LAYOUT, run="r") as recorder:
        before = time.monotonic_ns()
        record_iteration(recorder, 4)
        after = time.monotonic_ns()
    (file,) = open_run(tmp_path)
    found = list(read_events(file))
    (memory,) = [event for event in found if event["name"] == "memory"]
    assert memory["args"]["value"] > 1 << 20
    events = {event["cat"]: event for event in found if event is not memory}
    assert set(events) == {"wait", "task", "send", "arrival", "counter", "span", "iteration"}
    assert events["task"]["name"] == "1F2"
    what = {"iteration": 4, "kind": "F", "chunk": 1, "microbatch": 2, "piece": 0}
    assert events["task"]["args"] == what
    assert before <= file.time_ns(events["task"]) <= after
    assert events["wait"]["args"]["cause"] == "message"
    assert events["wait"]["dur"] == 1.0
    assert events["send"]["args"]["destination"] == 1
    assert events["send"]["args"]["bytes"] == 4096
    assert events["arrival"]["args"]["ahead"] is True
    assert events["arrival"]["args"]["sent_ns"] == file.time_ns(events["arrival"]) - 300
    assert events["counter"]["args"] == {"value": 3}
    assert events["span"]["name"] == "optimizer"


@pytest.mark.parametrize(
    ("iterations", "interval", "kept"),
    [(None, 1, [0, 1, 2, 3, 4, 5]), (None, 2, [0, 2, 4]), ({1, 4}, 1, [1, 4]), ({1, 4}, 2, [4])],
)
def test_only_the_iterations_asked_for_are_recorded(tmp_path, iterations, interval, kept):
    with open_recorder(
        tmp_path, rank=0, layout=LAYOUT, iterations=iterations, interval=interval
    ) as recorder:
        for iteration in range(6):
            record_iteration(recorder, iteration)
    found = [e["args"]["iteration"] for e in events_of(tmp_path) if e["cat"] == "task"]
    assert found == kept


def test_a_message_that_came_early_counts_for_its_own_iteration(tmp_path):
    """A neighbour may be an iteration ahead; a send and its arrival would not be paired."""
    with open_recorder(tmp_path, rank=0, layout=LAYOUT) as recorder:
        recorder.begin_iteration(3)
        recorder.put(CHANNEL, 2, 4096, "shm")
        recorder.taken(CHANNEL, Taken(1, 2))
        recorder.end_iteration()
    found = {e["cat"]: e["args"].get("iteration") for e in events_of(tmp_path)}
    assert (found["send"], found["arrival"]) == (3, Taken.iteration)


def test_spans_between_iterations_are_kept_and_tasks_are_not(tmp_path):
    with open_recorder(tmp_path, rank=0, layout=LAYOUT) as recorder:
        record_iteration(recorder, 0)
        with recorder.span("checkpoint"):
            recorder.begin_task("F", 0, 0)
            recorder.end_task()
    events = events_of(tmp_path)
    assert [e["name"] for e in events if e["cat"] == "span"] == ["optimizer", "checkpoint"]
    assert len([e for e in events if e["cat"] == "task"]) == 1


def test_a_full_queue_drops_events_and_says_how_many(tmp_path, monkeypatch, thread):
    monkeypatch.setattr("megatron.dpp.trace.recorder.QUEUE_EVENTS", 10)
    recorder = open_recorder(tmp_path, rank=0, layout=LAYOUT)
    recorder.begin_iteration(0)
    for _ in range(25):
        recorder.counter("held", 1)
    recorder.close()
    assert json.loads(LAYOUT.path(tmp_path).read_text())[-1]["args"]["dropped"] == 15
    assert len(events_of(tmp_path)) == 10


def test_a_file_that_was_not_ended_is_readable(tmp_path):
    """As of a process that was killed: lines are with the kernel a moment after their events."""
    recorder = open_recorder(tmp_path, rank=0, layout=LAYOUT)
    for iteration in range(20):
        record_iteration(recorder, iteration)
    deadline = time.monotonic() + 60
    while sum(event["cat"] == "iteration" for event in events_of(tmp_path)) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not open_run(tmp_path)[0].complete
    recorder.close()
    recorder.close()
    last = json.loads(LAYOUT.path(tmp_path).read_text())[-1]
    end = {"name": "end", "ph": "M", "pid": 0, "tid": TASK_TRACK, "args": {"dropped": 0}}
    assert last == end and open_run(tmp_path)[0].complete
    record_iteration(NullRecorder(), 0)


@pytest.mark.parametrize("text", ["", "a", "3-", "5-2", "1,,2"])
def test_wrong_iteration_lists_are_refused(text):
    with pytest.raises(ValueError, match="iterations"):
        parse_iterations(text)


def test_the_interval_is_positive(tmp_path):
    with pytest.raises(ValueError, match="interval 0"):
        open_recorder(tmp_path, rank=0, layout=LAYOUT, interval=0)


def test_a_file_takes_the_place_of_an_earlier_runs(tmp_path):
    for iterations in (3, 1):
        with open_recorder(tmp_path, rank=0, layout=LAYOUT) as recorder:
            for iteration in range(iterations):
                record_iteration(recorder, iteration)
    assert len([event for event in events_of(tmp_path) if event["cat"] == "iteration"]) == 1
    assert json.loads(LAYOUT.path(tmp_path).read_text())[0]["args"]["schema"] == 1
