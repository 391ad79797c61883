"""The text of each kind of event, and what a reader makes of headers and damaged lines."""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.direction import Direction
from megatron.dpp.errors import DataError
from megatron.dpp.report.reader import (
    open_run,
    parse_event,
    read_events,
    read_header,
)
from megatron.dpp.trace import lines as module
from megatron.dpp.trace.lines import EventLines, first_line, header, last_line
from megatron.dpp.trace.schema import (
    ARRIVAL_TRACK,
    SEND_TRACK,
    TASK_TRACK,
    TraceLayout,
    parse_iterations,
)
from tests.report.synthetic import Channel, Run, write

START = 10_000_000
CHANNEL = Channel(3, 4, 1, int(Direction.BACKWARD))


def written(*event: Any) -> dict[str, Any]:
    text = EventLines(5, START).line(event)
    assert text.startswith(",\n")
    found: dict[str, Any] = json.loads(text[2:])
    assert (found["pid"], found["ph"]) == (5, "C" if event[0] == "C" else "X")
    return found


@settings(max_examples=40)
@given(st.integers(-(10**15), 10**15))
def test_times_keep_every_nanosecond(nanoseconds: int) -> None:
    line = EventLines(0, 0).line(("task", nanoseconds, nanoseconds, 0, "F", 0, 0, 0))
    found = re.search(r'"ts":([-.0-9]+),', line)
    assert found is not None
    text = found[1]
    whole, _, rest = text.partition(".")
    assert len(rest) == 3
    assert int(whole.lstrip("-") + rest) * (-1 if text[0] == "-" else 1) == nanoseconds


def test_events_have_their_track_their_time_and_their_length() -> None:
    task = written("task", START - 500, START + 1500, 7, "W", 1, 3, 2)
    assert (task["name"], task["tid"], task["ts"], task["dur"]) == ("1W3.2", TASK_TRACK, -0.5, 2.0)
    assert task["args"]["piece"] == 2 and task["args"]["iteration"] == 7
    assert written("task", START, START, 7, "F", 0, 3, 0)["name"] == "0F3"
    late = written("task", START + 9, START, 7, "F", 0, 3, 0)
    assert late["dur"] == 0.0, "the marks of a device may be in no order"
    gap = written("wait", START, START + 10, 7, "message", 'F "1"')
    assert gap["name"] == "wait: message" and gap["args"]["detail"] == 'F "1"'
    assert "detail" not in written("wait", START, START + 10, 7, "host", "")["args"]


def test_a_send_begins_where_its_data_is_ready_and_says_how_long_that_took() -> None:
    send = written("send", START, START + 3000, 7, CHANNEL, 2, 4096, "shm")
    assert (send["tid"], send["ts"], send["dur"]) == (SEND_TRACK, 3.0, 0.0)
    assert send["args"] == {
        "iteration": 7, "source": 3, "destination": 4, "chunk": 1, "direction": "backward",
        "microbatch": 2, "bytes": 4096, "kind": "shm", "queued_us": 3.0,
    }  # fmt: skip
    early = written("send", START + 5, START, 7, "by name", 2, 4096, "shm")
    assert early["args"]["queued_us"] == 0.0 and early["args"]["channel"] == "by name"


def test_an_arrival_says_its_part_and_whether_it_was_taken_ahead() -> None:
    arrival = written("arrival", START, START + 2000, 7, CHANNEL, 2, 123, 4096, 1, False)
    assert (arrival["tid"], arrival["ts"], arrival["dur"]) == (ARRIVAL_TRACK, 0.0, 2.0)
    assert (arrival["args"]["sent_ns"], arrival["args"]["part"]) == (123, 1)
    assert "ahead" not in arrival["args"]
    ahead = written("arrival", START, START, 7, CHANNEL, 2, None, 4096, 0, True)
    assert ahead["args"]["ahead"] is True and "sent_ns" not in ahead["args"]


def test_channels_are_told_apart_although_memory_is_used_again() -> None:
    """An object at the address of one that has gone is another channel. The lines keep some
    thousand of them."""
    made, alive = EventLines(0, START), weakref.WeakSet[Any]()
    for number in range(3000):
        channel = Link(number)
        alive.add(channel)
        line = made.line(("send", START, START, 0, channel, 0, 1, "shm"))
        assert f'"source":{number},' in line and '"direction":"forward"' in line
        del channel
    assert len(alive) <= 1025


class Link:
    destination, chunk, direction = 0, 0, 0

    def __init__(self, source: int) -> None:
        self.source = source


def layout(**changes: Any) -> TraceLayout:
    usual: dict[str, Any] = {"data": 0, "pipeline": 0, "tensor": 0, "data_size": 1,
                             "pipeline_size": 2, "tensor_size": 1}  # fmt: skip
    return TraceLayout(**usual | changes)


def file_of(folder: Path, rank: int, unix_ns: int = 10**18, **changes: Any) -> Path:
    """The file of a rank without events."""
    where = layout(pipeline=rank, **changes)
    head = header(rank, where, "cpu", "run", 10**9)
    head["args"]["start_unix_ns"] = unix_ns
    path = where.path(folder)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(first_line(head) + last_line(rank, 0))
    return path


@pytest.mark.parametrize(
    ("apart", "mixed"), [(600, False), (601, True), (-600, False), (-601, True)]
)
def test_ranks_of_a_run_began_within_ten_minutes(tmp_path: Path, apart: int, mixed: bool) -> None:
    file_of(tmp_path, 0)
    file_of(tmp_path, 1, 10**18 + apart * 10**9)
    if mixed:
        with pytest.raises(DataError, match=r"files of several runs are mixed.*pipeline-1"):
            open_run(tmp_path)
        return
    assert [file.rank for file in open_run(tmp_path)] == [0, 1]


def test_a_rank_has_one_file_and_every_rank_has_one(tmp_path: Path) -> None:
    first, second = file_of(tmp_path, 0), file_of(tmp_path, 1)
    text = second.read_text()
    second.write_text(text.replace('"rank":1', '"rank":0'))
    with pytest.raises(DataError, match=r"rank 0 has two files: .*pipeline-0.*, .*pipeline-1"):
        open_run(tmp_path)
    second.write_text(text.replace('"num_chunks":1', '"num_chunks":2'))
    with pytest.raises(DataError, match="several runs are mixed"):
        open_run(tmp_path)
    second.unlink()
    with pytest.raises(DataError, match=r"1 of the run.s files are missing: .*pipeline-1"):
        open_run(tmp_path)
    assert [file.path for file in open_run(tmp_path, allow_missing=True)] == [first]


def test_only_the_last_line_of_a_file_that_was_cut_may_be_broken(tmp_path: Path) -> None:
    directory = write(Run(ranks=1, iterations=1), tmp_path)
    (path,) = directory.iterdir()
    whole = path.read_text().splitlines(keepends=True)
    all_events = list(read_events(read_header(path)))
    path.write_text("".join(whole[:-3]) + whole[-3][:30])
    (file,) = open_run(directory)
    assert not file.complete and list(read_events(file)) == all_events[:-1]
    path.write_text("".join(whole[:-3]) + whole[-3][:30] + "\n" + whole[-3])
    (file,) = open_run(directory)
    with pytest.raises(DataError, match=f"line {len(whole) - 2} is not an event"):
        list(read_events(file))
    path.write_text("".join(whole[:-2]) + "what is this\n")
    broken = dataclasses.replace(read_header(path), complete=True)
    with pytest.raises(DataError, match="the file is damaged"):
        list(read_events(broken))


def test_an_event_has_a_name_a_time_and_a_category() -> None:
    whole = {"ph": "X", "name": "x", "cat": "iteration", "ts": 1, "args": {"iteration": 1}}
    assert parse_event(json.dumps(whole) + ",\n") == whole
    assert parse_event('{"ph":"M","name":"end"}') == {"ph": "M", "name": "end"}
    broken = [{k: v for k, v in whole.items() if k != key} for key in whole]
    for wrong in (*broken, whole | {"args": []}, [whole], {"ph": "M"}):
        with pytest.raises(ValueError, match="no event"):
            parse_event(json.dumps(wrong))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ts": 1e400}, "ts is inf"),
        ({"dur": "1"}, "dur is '1'"),
        ({"name": ["x"]}, "name is"),
        ({"args": {}}, "it lacks iteration"),
        ({"args": {"iteration": 10**400}}, "iteration is"),
        ({"args": {"iteration": 1, "source": 0}}, "it lacks destination"),
        ({"args": {"iteration": 1, "chunk": -1}}, "chunk is -1"),
        ({"args": {"iteration": 1, "direction": ["forward"]}}, "direction is"),
        ({"args": {"iteration": 1, "value": 10**400}}, "value is 1"),
        ({"args": {"iteration": True}}, "iteration is True"),
    ],
)
def test_an_event_that_the_recorder_cannot_have_written_is_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The report ended in a KeyError or an OverflowError amid its sums. A file is read in blocks of
    lines: each block's good events come first."""
    whole = {"ph": "X", "name": "x", "cat": "iteration", "ts": 1, "args": {"iteration": 1}}
    wrong = json.dumps(whole | more)
    with pytest.raises(ValueError, match=said):
        parse_event(wrong)
    path = next(write(Run(ranks=1, iterations=1), tmp_path).iterdir())
    head = path.read_text().splitlines(keepends=True)[:2]
    good = json.dumps(whole) + ",\n"
    path.write_text("".join([*head, *[good] * 700, wrong + ",\n", *[good] * 700, "]"]))
    events = read_events(read_header(path))
    assert [next(events) for _ in range(700)] == [whole] * 700
    with pytest.raises(DataError, match=f"line 703 is not an event .{said}"):
        next(events)


def test_a_header_of_more_ranks_than_there_are_is_refused(tmp_path: Path) -> None:
    """The names of all their files were counted without end."""
    path = next(write(Run(ranks=1, iterations=1), tmp_path).iterdir())
    path.write_text(path.read_text().replace('"data_size":1', '"data_size":9000000000', 1))
    with pytest.raises(DataError, match="of \\(9000000000, 1, 1, 1\\) ranks with 1 chunks"):
        open_run(path.parent)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"process":', '"process":"x","y":', "the header holds 'x' as process"),
        ('"host":', '"host":3,"y":', "the header holds 3 as host"),
        ('"start_ns":', '"y":', "the header lacks 'start_ns'"),
    ],
)
def test_a_header_of_another_kind_is_refused(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    path = next(write(Run(ranks=1, iterations=1), tmp_path).iterdir())
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(DataError, match=said):
        read_header(path)


def test_the_categories_that_are_asked_for_are_read_alone(tmp_path: Path) -> None:
    directory = write(Run(ranks=2, iterations=1), tmp_path)
    file = open_run(directory)[0]
    every = list(read_events(file))
    some = ("send", "iteration")
    assert list(read_events(file, some)) == [each for each in every if each["cat"] in some]
    assert {each["cat"] for each in every} > set(some)


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", {3}), ("3-3", {3}), ("0, 2-4", {0, 2, 3, 4}), ("1,1-2", {1, 2})],
)
def test_both_ends_of_a_range_of_iterations_are_recorded(text: str, found: set[int]) -> None:
    assert parse_iterations(text) == found


def test_containers_of_one_host_with_times_of_their_own_have_two_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = module.clock_id()
    assert own == module.clock_id()
    monkeypatch.setattr("os.readlink", lambda path: f"of {path}")
    assert module.clock_id() == f"{own.split('/')[0]}/of /proc/self/ns/time" != own
