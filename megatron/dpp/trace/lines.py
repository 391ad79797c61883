"""The text of a trace file: what each recorded event looks like as a line.

The recorder's writing thread calls this with resolved times, the simulator with those of its
virtual clock. ``docs/trace-format.md`` describes the result.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron.dpp.trace.schema import (
    ARRIVAL_TRACK,
    HEADER_NAME,
    SCHEMA_VERSION,
    SEND_TRACK,
    TASK_TRACK,
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
    """What torchrun's environment says to tell one run from another; empty without torchrun."""
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
            **layout.as_dict(),
            "device": device,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "clock": clock_id(),
            "run": run_id() if run is None else run,
            "start_ns": start_ns,
            "start_unix_ns": time.time_ns(),
        },
    }


def link_of(channel: object) -> dict[str, Any]:
    """What an event says of its channel: its ends, chunk and direction, or just its name."""
    source = getattr(channel, "source", None)
    if source is None:
        return {"channel": str(channel)}
    direction = getattr(channel, "direction", 0)
    return {
        "source": source,
        "destination": getattr(channel, "destination", -1),
        "chunk": getattr(channel, "chunk", 0),
        "direction": "forward" if direction == 0 else "backward",
    }


def _slice(rank: int, track: int, name: str, cat: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": cat, "ph": "X", "pid": rank, "tid": track, "args": args}


def event_body(rank: int, event: tuple[Any, ...]) -> dict[str, Any]:
    """The Trace Event of a queued tuple, without its times."""
    code, iteration, rest = event[0], event[3], event[4:]
    args: dict[str, Any] = {"iteration": iteration}
    if code == "T":
        kind, chunk, microbatch, piece = rest
        args |= {"kind": kind, "chunk": chunk, "microbatch": microbatch, "piece": piece}
        name = f"{chunk}{kind}{microbatch}" + (f".{piece}" if piece else "")
        return _slice(rank, TASK_TRACK, name, "task", args)
    if code == "G":
        cause, detail = rest
        args |= {"cause": cause} | ({"detail": detail} if detail else {})
        return _slice(rank, TASK_TRACK, f"wait: {cause}", "wait", args)
    if code == "P":
        channel, microbatch, num_bytes, kind = rest
        args |= link_of(channel) | {"microbatch": microbatch, "bytes": num_bytes, "kind": kind}
        return _slice(rank, SEND_TRACK, f"send {microbatch}", "send", args)
    if code == "A":
        channel, microbatch, sent_ns, num_bytes, part = rest
        args |= link_of(channel) | {"microbatch": microbatch, "bytes": num_bytes, "part": part}
        if sent_ns is not None:
            args["sent_ns"] = sent_ns
        return _slice(rank, ARRIVAL_TRACK, f"arrival {microbatch}", "arrival", args)
    if code == "S":
        name, group = rest
        return _slice(rank, TASK_TRACK, name, "span", args | ({"group": group} if group else {}))
    if code == "C":
        name, value = rest
        body = _slice(rank, TASK_TRACK, name, "counter", {"value": value})
        return body | {"ph": "C"}
    return _slice(rank, TASK_TRACK, f"iteration {iteration}", "iteration", args)


def first_line(head: dict[str, Any]) -> str:
    """How a file starts."""
    return "[\n" + json.dumps(head, separators=(",", ":"))


def event_line(rank: int, event: tuple[Any, ...], start_ns: int) -> str:
    """One recorded event, whose times are in nanoseconds; ``start_ns`` is the time that ``ts`` 0
    stands for.
    """
    began, ended = event[1], event[2]
    body = event_body(rank, event)
    if event[0] == "P":
        body["args"]["queued_us"] = max(ended - began, 0) / 1000
        began = ended
    body["ts"] = (began - start_ns) / 1000
    if body["ph"] == "X":
        body["dur"] = max(ended - began, 0) / 1000
    return ",\n" + json.dumps(body, separators=(",", ":"))


def last_line(rank: int, dropped: int) -> str:
    """How a file ends: with the number of events that were lost."""
    last = {"name": "end", "ph": "M", "pid": rank, "tid": TASK_TRACK, "args": {"dropped": dropped}}
    return ",\n" + json.dumps(last, separators=(",", ":")) + "\n]\n"
