"""The text of a trace file: one line per recorded event.

The recorder's writing thread calls this with resolved times, the simulator with those of its
virtual clock. ``docs/trace-format.md`` describes the result.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron.dpp.direction import Direction
from megatron.dpp.trace.schema import (
    ARRIVAL_TRACK,
    HEADER_NAME,
    SCHEMA_VERSION,
    SEND_TRACK,
    TASK_TRACK,
    EventKind,
    TraceLayout,
)


def clock_id() -> str:
    """Names the ``CLOCK_MONOTONIC`` that this process reads: equal text means one clock.

    It is the kernel's boot id and, because containers may shift the clock, the time namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


def run_id() -> str:
    """Names this run, from torchrun's environment; empty without torchrun."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return "/".join(os.environ[name] for name in names if name in os.environ)


def header(
    rank: int, layout: TraceLayout, device: str, run: str | None, start_ns: int
) -> dict[str, Any]:
    """The first event of a file; ``start_ns`` is the monotonic time that ``ts`` 0 stands for."""
    return {
        "name": HEADER_NAME,
        "ph": "M",
        "pid": rank,
        "tid": TASK_TRACK,
        "args": {
            "schema": SCHEMA_VERSION,
            "rank": rank,
            **dataclasses.asdict(layout),
            "device": device,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "clock": clock_id(),
            "run": run_id() if run is None else run,
            "start_ns": start_ns,
            "start_unix_ns": time.time_ns(),
        },
    }


def first_line(head: dict[str, Any]) -> str:
    """The start of a file."""
    return "[\n" + json.dumps(head, separators=(",", ":"))


def _us(nanoseconds: int) -> str:
    """Microseconds with three decimals, exactly."""
    sign = "-" if nanoseconds < 0 else ""
    whole, rest = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{rest:03d}"


class EventLines:
    """Writes the events of one rank as text.

    Everything but free text is put together by hand: ``json.dumps`` of a dictionary takes five
    times as long, and this runs beside the training thread, under the same interpreter lock.

    Args:
        rank: global rank, the ``pid`` of every event.
        start_ns: the time that ``ts`` 0 stands for.
    """

    def __init__(self, rank: int, start_ns: int) -> None:
        self._start_ns = start_ns
        tracks = (TASK_TRACK, SEND_TRACK, ARRIVAL_TRACK)
        self._place = {track: f'"pid":{rank},"tid":{track}' for track in tracks}
        kinds = set(EventKind) - {EventKind.COUNTER}
        self._body = {kind: getattr(self, f"_{kind}") for kind in kinds}

    def line(self, event: tuple[Any, ...]) -> str:
        """One recorded event (see ``recorder``), whose times are in nanoseconds."""
        kind, began, ended = event[:3]
        if kind == EventKind.COUNTER:
            return self._counter(event)
        if kind == EventKind.SEND:
            began = ended
        times = f'"ts":{_us(began - self._start_ns)},"dur":{_us(max(ended - began, 0))}'
        return f",\n{{{self._body[kind](event)},{times}}}"

    def _head(self, name: str, cat: str, track: int, iteration: int, args: str = "") -> str:
        return (
            f'"name":"{name}","cat":"{cat}","ph":"X",{self._place[track]},'
            f'"args":{{"iteration":{iteration}{args}}}'
        )

    def _task(self, event: tuple[Any, ...]) -> str:
        _, _, _, iteration, kind, chunk, microbatch, piece = event
        name = f"{chunk}{kind}{microbatch}" + (f".{piece}" if piece else "")
        args = f',"kind":"{kind}","chunk":{chunk},"microbatch":{microbatch},"piece":{piece}'
        return self._head(name, "task", TASK_TRACK, iteration, args)

    def _experts(self, event: tuple[Any, ...]) -> str:
        _, _, _, iteration, chunk, microbatch, layer, first, group, counts = event
        args = (
            f',"chunk":{chunk},"microbatch":{microbatch},"layer":{layer},"first":{first},'
            f'"group":{group},"tokens":[{",".join(map(str, counts))}]'
        )
        return self._head(f"experts of layer {layer}", "experts", TASK_TRACK, iteration, args)

    def _wait(self, event: tuple[Any, ...]) -> str:
        _, _, _, iteration, cause, detail = event
        more = f',"detail":{json.dumps(detail)}' if detail else ""
        args = f',"cause":"{cause}"{more}'
        return self._head(f"wait: {cause}", "wait", TASK_TRACK, iteration, args)

    def _send(self, event: tuple[Any, ...]) -> str:
        _, called, ready, iteration, channel, microbatch, num_bytes, kind = event
        args = (
            f',{_link(channel)},"microbatch":{microbatch},"bytes":{num_bytes},'
            f'"kind":"{kind}","queued_us":{_us(max(ready - called, 0))}'
        )
        return self._head(f"send {microbatch}", "send", SEND_TRACK, iteration, args)

    def _arrival(self, event: tuple[Any, ...]) -> str:
        _, _, _, iteration, channel, microbatch, sent_ns, num_bytes, part, ahead = event
        sent = "" if sent_ns is None else f',"sent_ns":{sent_ns}'
        args = (
            f',{_link(channel)},"microbatch":{microbatch},"bytes":{num_bytes},'
            f'"part":{part}{sent}' + (',"ahead":true' if ahead else "")
        )
        return self._head(f"arrival {microbatch}", "arrival", ARRIVAL_TRACK, iteration, args)

    def _span(self, event: tuple[Any, ...]) -> str:
        _, _, _, iteration, name = event
        return self._head(json.dumps(name)[1:-1], "span", TASK_TRACK, iteration)

    def _iteration(self, event: tuple[Any, ...]) -> str:
        iteration = event[3]
        return self._head(f"iteration {iteration}", "iteration", TASK_TRACK, iteration)

    def _counter(self, event: tuple[Any, ...]) -> str:
        _, at, _, _, name, value = event
        return (
            f',\n{{"name":{json.dumps(name)},"cat":"counter","ph":"C",{self._place[TASK_TRACK]},'
            f'"args":{{"value":{float(value)}}},"ts":{_us(at - self._start_ns)}}}'
        )


@functools.lru_cache(1024)
def _link(channel: object) -> str:
    """The ends, chunk and direction of an event's channel, or just its name."""
    ends: dict[str, Any] = {"channel": str(channel)}
    if hasattr(channel, "source"):
        ends = {name: getattr(channel, name) for name in ("source", "destination", "chunk")}
        forward = getattr(channel, "direction", 0) == Direction.FORWARD
        ends["direction"] = "forward" if forward else "backward"
    return json.dumps(ends, separators=(",", ":"))[1:-1]


def last_line(rank: int, dropped: int) -> str:
    """The end of a file, with the number of events that were lost."""
    last = {"name": "end", "ph": "M", "pid": rank, "tid": TASK_TRACK, "args": {"dropped": dropped}}
    return ",\n" + json.dumps(last, separators=(",", ":")) + "\n]\n"
