"""The thread behind a recorder: turns queued tuples into lines of a trace file.

It wakes a few times per second, resolves the marks whose device time is known, formats a small
batch at a time (so that it never keeps the interpreter lock from the training thread for long) and
hands whole lines to the kernel, where they survive the death of the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from megatron.dpp.files.locks import lock_file
from megatron.dpp.files.safe_files import open_to_write
from megatron.dpp.trace.clock import DeviceClock, HostClock
from megatron.dpp.trace.lines import EventLines, first_line, header, last_line
from megatron.dpp.trace.schema import TraceLayout

_PERIOD_S = 0.2
_BATCH = 64
_DEVICE_PATIENCE_S = 5.0


class TraceWriter:
    """Owns a trace file and its thread; ``dropped`` counts events that met a full queue."""

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
        start_ns = time.monotonic_ns()
        self._lines = EventLines(rank, start_ns)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_write(path, append=True)
        lock_file(self._file, str(path))
        self._file.truncate(0)
        first = header(rank, layout, device, run, start_ns)
        self._write(first_line(first))
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
            self._write("".join(lines))
            time.sleep(0)

    def _write(self, text: str) -> None:
        """Hand text to the kernel. A full disk ends the trace, not the training."""
        if self._file.closed:
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            warnings.warn(f"{self.path}: the trace ends here ({error})", stacklevel=2)
            with contextlib.suppress(OSError):
                self._file.close()

    def _line(self, event: tuple[Any, ...]) -> str | None:
        """The text of an event; empty if its marks were lost, None until the device reached it."""
        start, end = event[1], event[2]
        if start is None or end is None:
            self.drop(event)
            return ""
        end_ns = end if isinstance(end, int) else self._clock.resolve(end)
        if end_ns is None:
            return None
        start_ns = start if isinstance(start, int) else self._clock.resolve(start)
        if start_ns is None:
            self.drop((event[0], start, end_ns))  # the end's mark is used up
            return ""
        return self._lines.line((event[0], start_ns, end_ns, *event[3:]))

    def drop(self, event: tuple[Any, ...]) -> None:
        """Count an event that is lost, and give its marks back: there are only so many."""
        self.dropped += 1
        for mark in event[1:3]:
            if mark is not None and not isinstance(mark, int):
                self._clock.discard(mark)

    def close(self) -> None:
        """Write what the device finishes in a few seconds and end the array. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + _DEVICE_PATIENCE_S
        while self._queue and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.001)
        self._write(last_line(self._rank, self.dropped + len(self._queue)))
        self._file.close()
