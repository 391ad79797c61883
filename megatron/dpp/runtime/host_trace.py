"""The trace of a host's training steps, as the plugin records it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.compat import default_groups
from megatron.dpp.runtime.static_exchange import traced
from megatron.dpp.trace import NullRecorder, Recorder, TraceLayout, open_recorder, parse_iterations
from megatron.dpp.trace.host import HostTrace


class StepTrace:
    """Records the calls of a schedule that train; each is one iteration of the trace.

    Args:
        settings: what is recorded, and where; None records nothing.
        log: called with a line that names the directory.
    """

    def __init__(self, settings: HostTrace | None, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
        self._recorder: Recorder | None = None
        self._last = -1

    @contextlib.contextmanager
    def step(self, number: int, keywords: dict[str, Any], schedule: str) -> Iterator[Recorder]:
        """Record the block as iteration ``number``, unless it is an evaluation, or a step that was
        recorded before.

        Args:
            keywords: of the schedule's call.
            schedule: as :attr:`TraceLayout.schedule`; the first step's names the directory.
        """
        skipped = keywords.get("forward_only") or number <= self._last
        if self._settings is None or skipped or compat.has_multimodule(keywords) or _is_capturing():
            yield NullRecorder()
            return
        if self._recorder is None:
            self._recorder = self._open(self._settings, keywords, schedule)
        self._last = number
        self._recorder.begin_iteration(number)
        try:
            yield self._recorder
        finally:
            self._recorder.end_iteration()

    @contextlib.contextmanager
    def static_step(self, number: int, keywords: dict[str, Any]) -> Iterator[None]:
        """:meth:`step` around a call of megatron-core's own schedule."""
        model = keywords["model"]
        chunks = model if isinstance(model, list) else [model]
        with self.step(number, keywords, "pp") as recorder, traced(recorder, chunks):
            yield

    def _open(self, settings: HostTrace, keywords: dict[str, Any], schedule: str) -> Recorder:
        model = keywords["model"]
        num_chunks = len(model) if isinstance(model, list) else 1
        layout = _layout(keywords.get("pg_collection") or default_groups(), num_chunks, schedule)
        folder = Path(settings.dir) / layout.directory_name()
        self._log(f"trace: {folder} (megatron-dpp report {folder})")
        on_gpu = torch.cuda.is_available()
        return open_recorder(
            settings.dir,
            rank=torch.distributed.get_rank(),
            layout=layout,
            device=f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu",
            iterations=parse_iterations(settings.iterations) if settings.iterations else None,
            interval=settings.interval,
        )

    def close(self) -> None:
        """End the file; later steps are not recorded."""
        recorder, self._recorder = self._recorder, None
        self._settings = None
        if recorder is not None:
            recorder.close()


def _layout(groups: Any, num_chunks: int, schedule: str) -> TraceLayout:
    """This rank's coordinates in the process groups of a call."""
    context = getattr(groups, "cp", None)
    of = {"pipeline": groups.pp, "tensor": groups.tp, "data": groups.dp_cp}
    if context is not None and context.size() > 1:
        of |= {"data": groups.dp, "context": context}
    places = {axis: torch.distributed.get_rank(group) for axis, group in of.items()}
    sizes = {f"{axis}_size": group.size() for axis, group in of.items()}
    return TraceLayout(**places, **sizes, num_chunks=num_chunks, schedule=schedule)


def _is_capturing() -> bool:
    """True while a CUDA graph of a whole step is captured, in which no event can be timed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
