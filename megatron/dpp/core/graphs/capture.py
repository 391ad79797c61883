"""Captures one function as one CUDA graph, whose random draws are those of a run without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.dpp.core import compat

_STATES = "tensor_parallel.random:_get_all_rng_states"


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


class CapturedRng:
    """Random draws inside of CUDA graphs, from the states that Megatron's tracker holds.

    A graph uses generators, not the saved states that the tracker switches between. During a
    capture the tracker holds generators of ours. They take its states before a replay and return
    them after it, so graphs and eager work draw the same numbers.
    """

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}
        self._repeating: list[torch.Generator] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[torch.Generator]]:
        """Prepare the tracker for a capture; yields the generators to register with the graph."""
        tracker = get_cuda_rng_tracker()
        states, was_safe = tracker.states_, tracker.use_cudagraphable_rng
        if was_safe:
            yield list(states.values())
            return
        for name in states:
            if name not in self._generators:
                self._generators[name] = _new_generator()
        tracker.states_, tracker.use_cudagraphable_rng = dict(self._generators), True
        try:
            yield [*self._generators.values(), *self._repeating]
        finally:
            tracker.states_, tracker.use_cudagraphable_rng = states, was_safe

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Exchange random states with the tracker around a replay."""
        tracker = get_cuda_rng_tracker()
        for name, generator in self._generators.items():
            generator.set_state(tracker.states_[name])
        yield
        for name, generator in self._generators.items():
            tracker.states_[name] = generator.get_state()

    @contextlib.contextmanager
    def repeating(self, draws: RecomputedDraws | None) -> Iterator[None]:
        """Let a captured backward draw from the generators of its recomputed parts, too."""
        self._repeating = draws.generators() if draws else []
        try:
            yield
        finally:
            self._repeating = []


_DEFAULT = ""
"""Name of the device's default generator among the tracker's names."""


@dataclass(frozen=True)
class _Draw:
    """A generator for one state of one recomputed part, at ``offset`` from the state ``source`` at
    the forward's beginning.
    """

    source: str
    offset: int
    generator: torch.Generator


class RecomputedDraws:
    """Lets a captured backward repeat its forward's random draws.

    megatron-core restores saved random states in the backward, which a graph cannot. So each
    recomputed part has a generator per state of the tracker, which is set to the forward's position
    before the backward is replayed. The positions hold for inputs of one shape: larger ones draw
    more numbers.

    Args:
        forward: runs the forward once, eagerly; the random states are then as before.

    Raises:
        TypeError: the tracker's states are generators (``use_te_rng_tracker``).
    """

    def __init__(self, forward: Callable[[], Any]) -> None:
        begun = self.states()
        parts: list[dict[str, torch.Tensor]] = []
        saved = compat.lookup(_STATES)()
        try:
            with _answering(lambda: parts.append(self.states())):
                forward()
                end = self.states()
        finally:
            compat.lookup("tensor_parallel.random:_set_all_rng_states")(*saved)
        drawn = [name for name in begun if not torch.equal(begun[name], end[name])]
        self._parts = [
            {
                name: _Draw(source, _offset(state) - _offset(begun[source]), _new_generator())
                for name, state in states.items()
                if (source := _source(name, state, begun)) in drawn
            }
            for states in parts
        ]

    @staticmethod
    def states() -> dict[str, torch.Tensor]:
        """The current random states, by the tracker's names."""
        states = {_DEFAULT: torch.cuda.get_rng_state(), **get_cuda_rng_tracker().states_}
        if not all(isinstance(state, torch.Tensor) for state in states.values()):
            raise TypeError("recomputed dropout needs random states that can be saved")
        return states

    def generators(self) -> list[torch.Generator]:
        """All generators, to register with graphs."""
        return [draw.generator for part in self._parts for draw in part.values()]

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """Let the recomputed parts of a captured forward keep our generators."""
        parts = iter(self._parts)
        with _answering(lambda: self._as_saved(next(parts))):
            yield

    @staticmethod
    def _as_saved(part: dict[str, _Draw]) -> tuple[Any, ...]:
        own = {name: draw.generator for name, draw in part.items()}
        tracked = get_cuda_rng_tracker().get_states()
        default = own.pop(_DEFAULT, None) or _default_generator().graphsafe_get_state()
        return torch.get_rng_state(), default, {**tracked, **own}

    def rewind(self, begun: dict[str, torch.Tensor]) -> None:
        """Set the generators for a backward whose forward began in these states."""
        for part in self._parts:
            for draw in part.values():
                state = begun[draw.source].clone()
                state.view(torch.int64)[1] += draw.offset
                draw.generator.set_state(state)


def _source(name: str, state: torch.Tensor, begun: dict[str, torch.Tensor]) -> str:
    """The name of the state's owner; the tracker may have switched the default generator to it."""
    seed = int(state.view(torch.int64)[0])
    alike = [known for known in begun if int(begun[known].view(torch.int64)[0]) == seed]
    return name if name in alike else alike[0]


def _offset(state: torch.Tensor) -> int:
    """The position of a CUDA generator; its state is two integers, the seed and this."""
    return int(state.view(torch.int64)[1])


def _default_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _new_generator() -> torch.Generator:
    return _default_generator().clone_state()


def _answering(answer: Callable[[], Any]) -> AbstractContextManager[None]:
    """Replace megatron-core's reading of all random states at the start of a recomputed part by
    ``answer``, unless that returns None.
    """
    return compat.patched(_STATES, lambda itself: answer() or itself())
