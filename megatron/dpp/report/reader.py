"""Reading the trace files of a run, one line at a time.

Checks that a directory holds one readable file per rank of one run. Yields events without ever
holding a whole file.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp.trace.schema import HEADER_NAME, SCHEMA_VERSION, EventKind, TraceLayout

_LONGEST_HEAD = 1 << 16
FILE_PATTERN = "benchmark-data-*-pipeline-*-tensor-*.json"
_SAME_START_NS = 600 * 10**9
_NAMED = 8
_SAID = 200
_MOST_STAGES = 1 << 20
_MOST = 1 << 63

Event = dict[str, Any]
_META_KEYS = frozenset({"ph", "name"})
_KEYS = _META_KEYS | {"cat", "ts", "args"}


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """One rank's file and what its header says; times are nanoseconds.

    ``start_ns`` is the rank's monotonic time that ``ts`` 0 stands for; equal ``clock`` texts name
    one clock.
    """

    path: Path
    rank: int
    layout: TraceLayout
    device: str
    host: str
    process: int
    clock: str
    run: str
    start_ns: int
    start_unix_ns: int
    complete: bool

    @property
    def alive(self) -> bool | None:
        """True while the process of the rank exists; None where it runs on another host."""
        here = self.host == socket.gethostname()
        return Path(f"/proc/{self.process}").exists() if here else None

    def time_ns(self, event: Event) -> int:
        """Start of an event on this rank's monotonic clock."""
        return self.start_ns + round(float(event["ts"]) * 1000)

    def duration_ns(self, event: Event) -> int:
        """Duration of an event."""
        return round(float(event.get("dur", 0)) * 1000)


def is_whole(value: object) -> bool:
    """True for a whole number of at most 64 bits, as a run counts and C++ holds it."""
    return type(value) is int and abs(value) < _MOST


_LAYOUT = {field.name: field.default for field in fields(TraceLayout)}
_TEXTS = ("device", "host", "clock", "run", "schedule")
_NUMBERS = ("rank", "process", "start_ns", "start_unix_ns", *(_LAYOUT.keys() - {"schedule"}))


def read_header(path: Path) -> TraceFile:
    """The header of one file.

    Raises:
        DataError: the file is empty, no trace of this project, or of another schema version.
    """
    try:
        with open_to_read(path) as file:
            first, second = (file.readline(_LONGEST_HEAD).decode() for _ in range(2))
            file.seek(max(0, path.stat().st_size - 256))
            complete = b'"name":"end"' in file.read()
        head = json.loads(second.rstrip().rstrip(","))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a readable trace file ({error})") from None
    if first.strip() != "[" or not isinstance(head, dict) or head.get("name") != HEADER_NAME:
        raise DataError(f"{path}: not a trace file of this project (no {HEADER_NAME} header)")
    args = head.get("args")
    if not isinstance(args, dict):
        raise DataError(f"{path}: the header lacks 'args'")
    if args.get("schema") != SCHEMA_VERSION:
        raise DataError(
            f"{path}: schema version {shown(args.get('schema'))}, this program reads "
            f"{SCHEMA_VERSION}; record the run again or use the version that wrote it"
        )
    values = {name: args.get(name, _LAYOUT.get(name, MISSING)) for name in (*_NUMBERS, *_TEXTS)}
    for name, value in values.items():
        if value is MISSING:
            raise DataError(f"{path}: the header lacks {name!r}")
        if not (type(value) is str if name in _TEXTS else is_whole(value)):
            raise DataError(f"{path}: the header holds {shown(value)} as {name}")
    layout = TraceLayout(**{name: values.pop(name) for name in _LAYOUT})
    inside = all(0 <= place < size for place, size in zip(layout.place, layout.sizes, strict=True))
    if not inside or not 0 < math.prod(layout.sizes) * layout.num_chunks <= _MOST_STAGES:
        raise DataError(
            f"{path}: the header holds place {layout.place} of {layout.sizes} ranks with "
            f"{layout.num_chunks} chunks"
        )
    return TraceFile(path=path, layout=layout, complete=complete, **values)


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "cat", "kind", "cause", "detail", "channel", "direction"), (str,)),
    **dict.fromkeys(("iteration", "chunk", "microbatch", "piece", "source", "destination"), (int,)),
    **dict.fromkeys(("part", "sent_ns", "bytes", "layer", "first", "group"), (int,)),
    **dict.fromkeys(("value", "ts", "dur"), (int, float)),
}
_FIELDS: dict[str, tuple[str, ...]] = {
    EventKind.TASK: ("iteration", "kind", "chunk", "microbatch", "piece"),
    EventKind.EXPERTS: ("iteration", "chunk", "microbatch", "layer", "first", "group", "tokens"),
    EventKind.WAIT: ("iteration", "cause"),
    EventKind.SEND: ("iteration", "microbatch", "bytes", "kind"),
    EventKind.ARRIVAL: ("iteration", "microbatch", "bytes"),
    EventKind.SPAN: ("iteration",),
    EventKind.ITERATION: ("iteration",),
    EventKind.COUNTER: ("value",),
}
"""Category -> fields that its events have."""


def _is_good(field: str, value: Any) -> bool:
    """True for a value of the field's type, numbers within 64 bits and, whole ones, from 0."""
    types = _TYPES.get(field)
    if types is None:
        return True
    least = 0 if types == (int,) else -_MOST
    return type(value) in types and (types == (str,) or least <= value < _MOST)


def parse_event(line: str) -> Event:
    """One line of a trace file; ValueError where the recorder cannot have written it."""
    try:
        event = json.loads(line.rstrip().rstrip(","))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    whole = isinstance(event, dict) and isinstance(event.get("args", {}), dict)
    if not whole or not event.keys() >= (_META_KEYS if event.get("ph") == "M" else _KEYS):
        raise ValueError("no event")
    if event["ph"] == "M":
        return event  # type: ignore[no-any-return]
    args = event["args"]
    for field, value in itertools.chain(event.items(), args.items()):
        if not _is_good(field, value):
            raise ValueError(f"{field} is {shown(value)}")
    needed = _FIELDS.get(event["cat"], ())
    for field in (*needed, *MessageId._fields) if "source" in args else needed:
        if field not in args:
            raise ValueError(f"it lacks {field}")
    return event  # type: ignore[no-any-return]


def read_events(file: TraceFile, only: tuple[str, ...] = ()) -> Iterator[Event]:
    """Every event after the header, or only those of some categories. A last line cut short by a
    crash is left out.

    Raises:
        DataError: another line is no event; the message names file and line.
    """
    marks = tuple(f'"cat":"{category}"' for category in only)
    broken = ""
    with io.TextIOWrapper(open_to_read(file.path), encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            wanted = not marks or any(mark in line for mark in marks)
            if number < 3 or line in ("]\n", "]") or not wanted:
                continue
            if broken:
                break
            try:
                event = parse_event(line)
            except ValueError as error:
                why = one_line(error, _SAID)
                broken = f"line {number} is not an event ({why}); the file is damaged"
                continue
            if event["ph"] != "M":
                yield event
        else:
            if not file.complete:
                return
    if broken:
        raise DataError(f"{file.path}: {broken}")


class MessageId(NamedTuple):
    """Names a message within an iteration; ``chunk`` is the receiver's."""

    source: int
    destination: int
    chunk: int
    direction: str
    microbatch: int


def message_of(event: Event) -> MessageId | None:
    """The message of a send or arrival; None for a channel known by name only."""
    args = event["args"]
    return MessageId(*(args[f] for f in MessageId._fields)) if "source" in args else None


def _names(paths: list[str]) -> str:
    rest = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _check_one_run(files: list[TraceFile]) -> None:
    first, seen = files[0], dict[int, str]()
    others = [
        file.path.name
        for file in files
        if file.layout.at(first.layout.place) != first.layout
        or file.run != first.run
        or abs(file.start_unix_ns - first.start_unix_ns) > _SAME_START_NS
    ]
    if others:
        raise DataError(
            f"{first.path.parent}: files of several runs are mixed; not of the run of "
            f"{first.path.name}: {_names(others)}. Remove the directory and record again"
        )
    for file in files:
        known = seen.setdefault(file.rank, file.path.name)
        if known != file.path.name:
            raise DataError(f"rank {file.rank} has two files: {known}, {file.path.name}")


def open_run(directory: str | os.PathLike[str], *, allow_missing: bool = False) -> list[TraceFile]:
    """The files of a run in rank order, checked.

    Args:
        directory: ``benchmark/data-...``, or its parent when that holds a single run.
        allow_missing: accept a run some of whose ranks have no file.

    Raises:
        DataError: no files, broken, missing, mixed or old ones; the message names them.
    """
    root = Path(directory)
    if not root.is_dir():
        raise DataError(f"{root}: no such directory")
    paths = sorted(root.glob(FILE_PATTERN)) or sorted(root.glob(f"*/{FILE_PATTERN}"))
    if not paths:
        raise DataError(f"{root}: no trace (files are called {FILE_PATTERN})")
    files = sorted((read_header(path) for path in paths), key=lambda file: file.rank)
    _check_one_run(files)
    layout = files[0].layout
    places = itertools.product(*map(range, layout.sizes))
    names = {layout.at(place).file_name() for place in places}
    missing = sorted(names - {path.name for path in paths})
    if missing and not allow_missing:
        raise DataError(f"{root}: {len(missing)} of the run's files are missing: {_names(missing)}")
    return files
