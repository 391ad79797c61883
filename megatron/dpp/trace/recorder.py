"""Recording of one rank, cheap enough to leave on.

The executor (and the wrapper around megatron-core's static schedules) calls a :class:`Recorder`
from its one thread. A call reads a clock, or records two pooled CUDA events, and appends a tuple to
a bounded queue; a thread of the recorder turns tuples into lines of the file. Nothing here waits
for a device, formats text or writes on the caller's thread. When the queue is full, events are
dropped and counted; the file says how many.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron.dpp.trace.clock import DeviceClock, HostClock, clock_for
from megatron.dpp.trace.schema import EventKind, TraceLayout
from megatron.dpp.trace.writer import TraceWriter

_TASK, _EXPERTS, _WAIT, _SEND, _ARRIVAL, _SPAN, _ITERATION, _COUNTER = EventKind
"""Names of this module: reading a member of an enumeration takes ten times as long."""

QUEUE_EVENTS = 1 << 16
"""Most events that wait for the writing thread: about 20 MB, seconds of work of a busy rank."""


_NOTHING = contextlib.nullcontext()


class Recorder:
    """The interface of a trace; this base class records nothing.

    Used from one thread; every method but ``close`` is cheap and never raises. Times are
    ``time.monotonic_ns()`` of this host. A *channel* is a
    :class:`~megatron.dpp.transport.base.ChannelSpec` or any text that names one.
    """

    enabled = False
    iteration = 0

    def begin_iteration(self, iteration: int) -> None:
        """Start a training iteration; ``iterations`` and ``interval`` decide if it is recorded."""

    def end_iteration(self) -> None:
        """End the iteration, optimizer step included."""

    def begin_task(self, kind: str, chunk: int, microbatch: int, piece: int = 0) -> None:
        """Start a task of kind F, B or W; ``piece`` numbers the parts of a split task."""

    def end_task(self) -> None:
        """End the task begun last (on a GPU: its work is queued)."""

    @property
    def in_forward(self) -> bool:
        """True while a forward is recorded."""
        return False

    def mark(self) -> Any:
        """This point of the device's work, for ``gap``, ``experts`` and ``Message.arrived_ns``."""
        return 0

    def experts(
        self, start: Any, end: Any, *, layer: int, first: int, group: int, counts: Sequence[int]
    ) -> None:
        """Record that this rank's experts of a layer ran in the current forward, from one mark to
        another.

        Args:
            layer: number of the layer in the model, from 1.
            first: number of this rank's first expert.
            group: first rank of the expert-parallel group.
            counts: tokens of each of this rank's experts.
        """

    def gap(self, start: Any, end: Any, cause: str, detail: str = "") -> None:
        """Record that no task ran from ``start`` to ``end``, two times in ns or two marks;
        ``cause`` is an ``IdleCause``.
        """

    def put(self, channel: object, microbatch: int, num_bytes: int, kind: str) -> None:
        """Record a message handed to the transport; ``kind`` is the transport's, as ``shm``."""

    def taken(self, channel: object, message: Any, *, ahead: bool = False) -> None:
        """Record a message (:class:`~megatron.dpp.transport.base.Message`) taken. Its ``sent_ns``
        is on the sender's clock, its ``arrived_ns`` on this one. ``ahead``: it was taken before it
        arrived; ``arrived_ns`` is then the device's mark of its arrival.
        """

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Record other work, as ``optimizer`` or ``batch``; also between two iterations."""
        return _NOTHING

    def counter(self, name: str, value: float) -> None:
        """Record a quantity, such as ``held`` activations. The recorder itself adds ``memory``, the
        most bytes in use so far, at the end of each iteration.
        """

    def close(self) -> None:
        """Write what is left and end the file. May be called twice."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullRecorder(Recorder):
    """Records nothing; the recorder of a run without a trace."""


class FileRecorder(Recorder):
    """Records into one rank's file. Open it with :func:`open_recorder`."""

    enabled = True

    def __init__(
        self,
        writer: TraceWriter,
        queue: deque[tuple[Any, ...]],
        clock: HostClock | DeviceClock,
        *,
        iterations: Collection[int] | None,
        interval: int,
    ) -> None:
        self._writer = writer
        self._queue = queue
        self._clock = clock
        self._iterations = iterations
        self._interval = interval
        self._recording = False
        self._spans = False
        self.iteration = 0
        self._iteration_start: Any = None
        self._task: tuple[str, int, int, int] | None = None
        self._task_start: Any = None

    def _append(self, *event: Any) -> None:
        if len(self._queue) < QUEUE_EVENTS:
            self._queue.append(event)
        else:
            self._writer.drop(event)

    def begin_iteration(self, iteration: int) -> None:
        self.iteration = iteration
        chosen = self._iterations is None or iteration in self._iterations
        self._recording = self._spans = chosen and iteration % self._interval == 0
        if self._recording:
            self._iteration_start = self._clock.mark()

    def end_iteration(self) -> None:
        if self._recording:
            self.counter("memory", self._clock.peak_memory())
            self._append(_ITERATION, self._iteration_start, self._clock.mark(), self.iteration)
        self._recording = False

    def begin_task(self, kind: str, chunk: int, microbatch: int, piece: int = 0) -> None:
        if self._recording:
            self._task = (kind, chunk, microbatch, piece)
            self._task_start = self._clock.mark()

    def end_task(self) -> None:
        if self._task is not None:
            self._append(_TASK, self._task_start, self._clock.mark(), self.iteration, *self._task)
            self._task = None

    @property
    def in_forward(self) -> bool:
        return self._task is not None and self._task[0] == "F"

    def mark(self) -> Any:
        return self._clock.mark() if self._recording else None

    def experts(
        self, start: Any, end: Any, *, layer: int, first: int, group: int, counts: Sequence[int]
    ) -> None:
        if self._task is not None:
            _, chunk, microbatch, *_ = self._task
            where = (chunk, microbatch, layer, first, group)
            self._append(_EXPERTS, start, end, self.iteration, *where, counts)

    def gap(self, start: Any, end: Any, cause: str, detail: str = "") -> None:
        if self._recording:
            self._append(_WAIT, start, end, self.iteration, cause, detail)

    def put(self, channel: object, microbatch: int, num_bytes: int, kind: str) -> None:
        if self._recording:
            called, ready = time.monotonic_ns(), self._clock.mark()
            self._append(_SEND, called, ready, self.iteration, channel, microbatch, num_bytes, kind)

    def taken(self, channel: object, message: Any, *, ahead: bool = False) -> None:
        if self._recording:
            arrived = message.arrived_ns
            taken = time.monotonic_ns() if isinstance(arrived, int) else self._clock.mark()
            num_bytes = getattr(getattr(message, "tensor", None), "nbytes", 0)
            what = (channel, message.microbatch, message.sent_ns, num_bytes)
            part = getattr(message, "part", 0)
            self._append(_ARRIVAL, arrived, taken, message.iteration, *what, part, ahead)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            self._append(_SPAN, start, self._clock.mark(), self.iteration, name)

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._timed(name) if self._spans else _NOTHING

    def counter(self, name: str, value: float) -> None:
        if self._recording:
            now = time.monotonic_ns()
            self._append(_COUNTER, now, now, self.iteration, name, value)

    def close(self) -> None:
        self._recording = self._spans = False
        self._writer.close()


def open_recorder(
    directory: str | os.PathLike[str],
    *,
    rank: int,
    layout: TraceLayout,
    device: Any = "cpu",
    iterations: Collection[int] | None = None,
    interval: int = 1,
    run: str | None = None,
) -> Recorder:
    """Start the trace file of this rank.

    Args:
        directory: the trace directory; the file is ``layout.path(directory)`` and replaces one of
            an earlier run.
        rank: global rank.
        layout: coordinates and sizes.
        device: a ``torch.device``, or its text; on ``cuda`` stream events time tasks.
        iterations: the only ones to record (default: all).
        interval: record every ``interval``-th iteration.
        run: text that all ranks of this run share and no other run has (default: from torchrun's
            environment).

    Raises:
        ValueError: ``interval`` is not positive.
        DataError: another process writes the file.
        OSError: the directory cannot be made or the file cannot be written.
    """
    if interval < 1:
        raise ValueError(f"trace interval {interval}: must be at least 1")
    clock = clock_for(str(device))
    queue: deque[tuple[Any, ...]] = deque()
    writer = TraceWriter(
        layout.path(directory), queue, clock, rank=rank, layout=layout, device=str(device), run=run
    )
    return FileRecorder(writer, queue, clock, iterations=iterations, interval=interval)
