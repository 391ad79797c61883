"""``megatron-dpp aggregate``: merge the trace files of all ranks into one for Perfetto.

    megatron-dpp aggregate --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp

Prints how well the ranks' clocks could be aligned. Streams: two passes over the files (clocks, then
events), one file open at a time, at most one iteration of one rank in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.files.safe_files import replacing
from megatron.dpp.report.align import Alignment, align, message_key
from megatron.dpp.report.analysis.model import JobShape
from megatron.dpp.report.reader import Event, TraceFile, open_run, read_events
from megatron.dpp.report.run_files import find_run
from megatron.dpp.trace.schema import (
    ARRIVAL_TRACK,
    SCHEMA_VERSION,
    SEND_TRACK,
    TASK_TRACK,
    EventKind,
)

_TICK_US = 1.0
_BLOCK = 8192


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Merge the trace files of all ranks into one for ui.perfetto.dev."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="home or traces of a run (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--output", metavar="FILE",
        help="merged trace; .json.gz compresses it (default: DIR/aggregated.json)")  # fmt: skip
    add("--allow-missing", action="store_true", help="merge although files of ranks are missing")
    return parser


def _run(options: argparse.Namespace) -> int:
    name = options.benchmark_dir or options.run or "runs/latest"
    files = open_run(find_run(name).need_traces(), allow_missing=options.allow_missing)
    output = Path(options.output) if options.output else files[0].path.parent / "aggregated.json"
    alignment, count = merge(files, output)
    clocks, most = len(alignment.offsets), alignment.uncertainty_ns / 1000
    aligned = f"{clocks}, aligned by messages within {most:.1f} us"
    print(f"clocks: {'all ranks read one clock' if clocks == 1 else aligned}")
    if short := [str(file.rank) for file in files if not file.complete]:
        print(f"cut short (the run was killed or is still running): ranks {', '.join(short)}")
    print(f"{count} events of {len(files)} ranks in {output}; open it in https://ui.perfetto.dev")
    return 0


def _metadata(file: TraceFile, name: str, order: int) -> Iterator[Event]:
    """Name and place of a rank's tracks."""
    named = (
        ("process_name", TASK_TRACK, {"name": name}),
        ("process_labels", TASK_TRACK, {"labels": f"{file.host} {file.device}"}),
        ("process_sort_index", TASK_TRACK, {"sort_index": order}),
        ("thread_name", TASK_TRACK, {"name": "tasks"}),
        ("thread_name", SEND_TRACK, {"name": "sends"}),
        ("thread_name", ARRIVAL_TRACK, {"name": "arrivals"}),
    )
    for what, track, args in named:
        yield {"name": what, "ph": "M", "pid": file.rank, "tid": track, "args": args}


def _arrow(event: Event, counts: dict[str, Counter[tuple[Any, ...]]]) -> Event | None:
    """The arrow's end at a send or arrival; None for a channel known by name only. ``counts``
    numbers the messages of one iteration that share a key: parts of a message travel in order.
    """
    key, cat = message_key(event), event["cat"]
    if key is None:
        return None
    numbers = counts.setdefault(cat, Counter())
    if numbers and next(iter(numbers))[0] != key[0]:
        numbers.clear()
    numbers[key] += 1
    digest = hashlib.blake2b(repr((key, numbers[key])).encode(), digest_size=8).digest()
    return {
        "name": "message",
        "cat": "message",
        "ph": "s" if cat == EventKind.SEND else "f",
        "id": int.from_bytes(digest, "big") >> 12,  # 52 bits survive JavaScript
        **{field: event[field] for field in ("pid", "tid", "ts")},
        **({} if cat == EventKind.SEND else {"bp": "e"}),
    }


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


def _events_of(file: TraceFile, alignment: Alignment, origin_ns: int) -> Iterator[Event]:
    """A rank's events on the common time line, in us from ``origin_ns``, with their arrows."""

    def time_us(rank: int, time_ns: int) -> float:
        return (alignment.to_global(rank, time_ns) - origin_ns) / 1000

    counts: dict[str, Counter[tuple[Any, ...]]] = {}
    block = list[Event]()
    for event in read_events(file):
        cat, args = event["cat"], event["args"]
        event["ts"] = time_us(file.rank, file.time_ns(event))
        sent_ns, source = args.pop("sent_ns", None), args.get("source")
        if sent_ns is not None and source in alignment.clocks:
            args["latency_us"] = event["ts"] - time_us(source, sent_ns)
        if cat in (EventKind.SEND, EventKind.ARRIVAL):
            arrow = _arrow(event, counts)
            if arrow is not None:
                yield arrow
            block.append(event)
        else:
            yield event
        if cat == EventKind.ITERATION or len(block) >= _BLOCK:
            yield from _ticks(block)
            block.clear()
    yield from _ticks(block)


def merge(files: list[TraceFile], output: str | os.PathLike[str]) -> tuple[Alignment, int]:
    """Write one trace of all ``files``; a name that ends in ``.gz`` is compressed.

    The output appears under its name when it is whole. Returns the alignment used and the number of
    events.

    Raises:
        DataError: damaged files, or clocks that cannot be aligned.
        OSError: the output cannot be written.
    """
    alignment = align(files)
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    origin_ns = min(alignment.to_global(file.rank, file.start_ns) for file in files)
    shape = JobShape.of(files)
    order = [rank for ranks in shape.pipelines() for rank in ranks]
    about = {
        "schema": SCHEMA_VERSION,
        "uncertainty_ns": alignment.uncertainty_ns,
        "cut_short": [file.rank for file in files if not file.complete],
    }
    count = 0
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(replacing(os.fspath(output)))
        if os.fspath(output).endswith(".gz"):
            stream = stack.enter_context(gzip.GzipFile("", "wb", 3, stream))  # type: ignore[arg-type]
        text = stack.enter_context(io.TextIOWrapper(stream, encoding="utf-8"))
        text.write('{"traceEvents":[\n')
        for file in files:
            named = _metadata(file, shape.name_of(file.rank), order.index(file.rank))
            first = "" if file is files[0] else ",\n"
            text.write(first + ",\n".join(map(encode, named)))
            for event in _events_of(file, alignment, origin_ns):
                text.write(",\n" + encode(event))
                count += 1
        text.write(f'\n],"displayTimeUnit":"ms","otherData":{encode(about)}}}\n')
    return alignment, count


main = command("megatron-dpp aggregate", _parser, _run)
