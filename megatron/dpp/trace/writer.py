"""The thread behind a recorder: turns queued tuples into lines of a trace file.

It wakes a few times per second, resolves the marks whose device time is known, formats a small
batch at a time (so that it never keeps the interpreter lock from the training thread for long) and
hands whole lines to the kernel, where they survive the death of the process.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from megatron.dpp.trace.clock import DeviceClock, HostClock
from megatron.dpp.trace.schema import (
    ARRIVAL_TRACK,
    HEADER_NAME,
    SCHEMA_VERSION,
    SEND_TRACK,
    TASK_TRACK,
    TraceLayout,
)

_PERIOD_S = 0.2
_BATCH = 64
_DEVICE_PATIENCE_S = 5.0
_MARKED = frozenset("ITS")


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


class TraceWriter:
    """Owns a trace file and the thread that fills it. ``dropped`` counts events that found the
    queue full.
    """

    def __init__(
        self,
        path: Path,
        queue: deque[tuple[Any, ...]],
        clock: HostClock | DeviceClock,
        *,
        rank: int,
        layout: TraceLayout,
        device: str,
        run: str | None,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._queue = queue
        self._clock = clock
        self._rank = rank
        self._start_ns = time.monotonic_ns()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        first = header(rank, layout, device, run, self._start_ns)
        self._file.write(b"[\n" + json.dumps(first, separators=(",", ":")).encode())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dpp-trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._drain()

    def _drain(self) -> None:
        while self._queue:
            lines: list[str] = []
            while self._queue and len(lines) < _BATCH:
                line = self._line(self._queue[0])
                if line is None:
                    break
                self._queue.popleft()
                lines.append(line)
            if not lines:
                return
            self._file.write("".join(lines).encode())
            time.sleep(0)

    def _line(self, event: tuple[Any, ...]) -> str | None:
        """The text of an event, empty for one whose marks were lost, None while the device has not
        reached it.
        """
        times = self._times(event) if event[0] in _MARKED else (event[1], event[2])
        if times is None:
            return None
        start, end = times
        if start is None or end is None:
            self.dropped += 1
            return ""
        body = event_body(self._rank, event)
        body["ts"] = (start - self._start_ns) / 1000
        if body["ph"] == "X":
            body["dur"] = max(end - start, 0) / 1000
        return ",\n" + json.dumps(body, separators=(",", ":"))

    def _times(self, event: tuple[Any, ...]) -> tuple[int | None, int | None] | None:
        start, end = event[1], event[2]
        if start is None or end is None:
            for mark in (start, end):
                if mark is not None:
                    self._clock.discard(mark)
            return None, None
        end_ns = self._clock.resolve(end)
        if end_ns is None:
            return None
        return self._clock.resolve(start), end_ns

    def close(self) -> None:
        """Write what the device finishes within a few seconds, then end the array. May be called
        twice.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + _DEVICE_PATIENCE_S
        while self._queue and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.001)
        last = {
            "name": "end",
            "ph": "M",
            "pid": self._rank,
            "tid": TASK_TRACK,
            "args": {"dropped": self.dropped + len(self._queue)},
        }
        self._file.write((",\n" + json.dumps(last, separators=(",", ":")) + "\n]\n").encode())
        self._file.close()
