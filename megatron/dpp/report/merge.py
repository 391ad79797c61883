"""All ranks of a run in one Chrome Trace Event file.

Streams: two passes over the files (clocks, then events), one file open at a time, at most one
iteration of one rank in memory. Perfetto and chrome://tracing read the result.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from megatron.dpp.files.safe_files import open_to_write
from megatron.dpp.report.align import Alignment, align, message_key
from megatron.dpp.report.analysis.places import full_name, slice_names
from megatron.dpp.report.reader import Event, TraceFile, read_events
from megatron.dpp.schedule import groups_of
from megatron.dpp.trace.schema import ARRIVAL_TRACK, SCHEMA_VERSION, SEND_TRACK, TASK_TRACK
from megatron.dpp.trace.vocabulary import EventKind

_TICK_US = 1.0
_BLOCK = 8192

Progress = Callable[[str, TraceFile], None]


def _flow_id(event: Event, occurrence: int) -> int:
    """A number that a send and its arrival agree on; 52 bits survive JavaScript."""
    text = repr((message_key(event), occurrence)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 12


class _Arrows:
    """Numbers the messages of one rank that share a key: parts of a message travel in order."""

    def __init__(self) -> None:
        self._iteration: dict[str, int] = {}
        self._count: dict[tuple[Any, ...], int] = {}

    def event(self, slice_: Event) -> Event | None:
        """The arrow's end at a send or arrival slice; None for a channel known by name only."""
        key = message_key(slice_)
        if key is None:
            return None
        cat = slice_["cat"]
        if self._iteration.get(cat) != key[0]:
            self._iteration[cat] = key[0]
            self._count = {k: n for k, n in self._count.items() if k[0] != cat}
        numbered = (cat, *key)
        occurrence = self._count[numbered] = self._count.get(numbered, 0) + 1
        arrow: Event = {
            "name": "message",
            "cat": "message",
            "ph": "s" if cat == EventKind.SEND else "f",
            "id": _flow_id(slice_, occurrence),
            "pid": slice_["pid"],
            "tid": slice_["tid"],
            "ts": slice_["ts"],
        }
        return arrow if cat == EventKind.SEND else arrow | {"bp": "e"}


def _metadata(file: TraceFile) -> Iterator[Event]:
    layout, rank = file.layout, file.rank
    replica = layout.data if layout.data_size > 1 else None
    tensor = layout.tensor if layout.tensor_size > 1 else None
    context = layout.context if layout.context_size > 1 else None
    order = layout.data * layout.tensor_size + layout.tensor
    order = (order * layout.context_size + layout.context) * layout.pipeline_size
    name = full_name(rank, layout.pipeline, replica, tensor, context)
    named = (
        ("process_name", TASK_TRACK, {"name": name}),
        ("process_labels", TASK_TRACK, {"labels": f"{file.host} {file.device}"}),
        ("process_sort_index", TASK_TRACK, {"sort_index": order + layout.pipeline}),
        ("thread_name", TASK_TRACK, {"name": "tasks"}),
        ("thread_name", SEND_TRACK, {"name": "sends"}),
        ("thread_name", ARRIVAL_TRACK, {"name": "arrivals"}),
    )
    for name, track, args in named:
        yield {"name": name, "ph": "M", "pid": rank, "tid": track, "args": args}


def _ticks(block: list[Event]) -> Iterator[Event]:
    """Sends and arrivals as short slices that never overlap, with their queueing times."""
    block.sort(key=lambda event: (event["tid"], event["ts"]))
    following: Event | None = None
    later = math.inf
    for event in reversed(block):
        if following is None or following["tid"] != event["tid"]:
            later = math.inf
        elif following["ts"] > event["ts"]:
            later = following["ts"]
        if event["cat"] == EventKind.ARRIVAL:
            event["args"]["queued_us"] = event["dur"]
        event["dur"] = min(_TICK_US, later - event["ts"])
        following = event
    yield from block


class _Shift:
    """Moves a rank's events onto the common time line, in us from the run's first event."""

    def __init__(self, file: TraceFile, alignment: Alignment, origin_ns: int) -> None:
        self._file, self._origin_ns, self._alignment = file, origin_ns, alignment

    def time_us(self, rank: int, time_ns: int) -> float:
        return (self._alignment.to_global(rank, time_ns) - self._origin_ns) / 1000

    def __call__(self, event: Event) -> Event:
        event["ts"] = self.time_us(self._file.rank, self._file.time_ns(event))
        sent_ns = event.get("args", {}).pop("sent_ns", None)
        source = event.get("args", {}).get("source")
        if sent_ns is not None and source in self._alignment.clocks:
            event["args"]["latency_us"] = event["ts"] - self.time_us(source, sent_ns)
        return event


def _labelled(tasks: list[Event]) -> list[Event]:
    """The tasks of one rank's iteration, with their slices in their names."""
    what = [event["args"] for event in tasks]
    order = [one["microbatch"] for one in what if one["kind"] == "B" and one["chunk"] == 0]
    names = dict(enumerate(slice_names(groups_of(order))))
    for event, one in zip(tasks, what, strict=True):
        event["name"] += names.get(one["microbatch"], "")
    return tasks


def _events_of(file: TraceFile, shift: _Shift) -> Iterator[Event]:
    arrows, block, tasks = _Arrows(), list[Event](), list[Event]()
    for event in read_events(file):
        shift(event)
        if event.get("cat") in (EventKind.SEND, EventKind.ARRIVAL):
            arrow = arrows.event(event)
            if arrow is not None:
                yield arrow
            block.append(event)
        elif event.get("cat") == EventKind.TASK:
            tasks.append(event)
        else:
            yield event
        if event.get("cat") == EventKind.ITERATION:
            yield from _labelled(tasks)
            tasks.clear()
        if event.get("cat") == EventKind.ITERATION or len(block) >= _BLOCK:
            yield from _ticks(block)
            block.clear()
    yield from (*tasks, *_ticks(block))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    with open_to_write(path) as raw:
        if path.suffix == ".gz":
            with gzip.open(raw, "wt", encoding="utf-8", compresslevel=3) as packed:
                yield packed
            return
        with io.TextIOWrapper(raw, encoding="utf-8") as text:
            yield text


def _write_events(
    output: TextIO, files: list[TraceFile], alignment: Alignment, progress: Progress
) -> int:
    origin = min(alignment.to_global(file.rank, file.start_ns) for file in files)
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    count, separator = 0, ""
    for file in files:
        for event in _metadata(file):
            output.write(separator + encode(event))
            separator = ",\n"
        for event in _events_of(file, _Shift(file, alignment, origin)):
            output.write(separator + encode(event))
            count += 1
        progress("merging", file)
    return count


def merge(
    files: list[TraceFile],
    output: str | os.PathLike[str],
    *,
    progress: Progress = lambda phase, file: None,
) -> tuple[Alignment, int]:
    """Write one trace of all ``files``; a name that ends in ``.gz`` is compressed.

    The output appears under its name when it is whole. Returns the alignment used and the number of
    events.

    Raises:
        DataError: damaged files, or clocks that cannot be aligned.
        OSError: the output cannot be written.
    """
    alignment = align(files, lambda file: progress("aligning", file))
    path = Path(output)
    partial = path.with_name(f".{path.name}" if path.suffix == ".gz" else f".{path.name}.part")
    try:
        with _open(partial) as stream:
            stream.write('{"traceEvents":[\n')
            count = _write_events(stream, files, alignment, progress)
            about = {
                "schema": SCHEMA_VERSION,
                "alignment": alignment.summary(),
                "uncertainty_ns": alignment.uncertainty_ns,
                "cut_short": [file.rank for file in files if not file.complete],
            }
            tail = json.dumps(about, separators=(",", ":"))
            stream.write(f'\n],"displayTimeUnit":"ms","otherData":{tail}}}\n')
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return alignment, count
