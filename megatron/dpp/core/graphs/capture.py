"""Captures one function as one CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.dpp.core.graphs.rng import CapturedRng


class Replayable(Protocol):
    """Captured work."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None], Any], Replayable]
"""Captures work: (function, memory pool) -> graph. Tests without a GPU pass their own."""


def can_capture(capture: Capture | None) -> bool:
    """True if CUDA graphs, or the ``capture`` of a test, are available."""
    return capture is not None or torch.cuda.is_available()


class CudaGraph:
    """One captured function, not executed by the capture."""

    def __init__(
        self, function: Callable[[], None], pool: Any, stream: torch.cuda.Stream, rng: CapturedRng
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with rng.capturing() as generators, torch.cuda.stream(stream):
            for generator in generators:
                self._graph.register_generator_state(generator)
            # Other threads (the transport's, NCCL's watchdog) go on calling the driver meanwhile.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to report
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        # A capture zeroes its generators' places in memory, on its stream: not after the first
        # replay has filled them.
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


def cuda_capture(rng: CapturedRng) -> Capture:
    """Capture CUDA graphs on a stream of their own, with these random states."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return lambda function, pool: CudaGraph(function, pool, stream, rng)
