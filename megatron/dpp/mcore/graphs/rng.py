"""Random draws inside of CUDA graphs, the same as without them. ``graphs`` is the only caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.dpp.mcore import compat

_STATES = "tensor_parallel.random:_get_all_rng_states"


class CapturedRng:
    """Random draws inside of CUDA graphs, from the states that Megatron's tracker holds.

    A graph follows generators, not the saved states that the tracker switches between. While work
    is captured the tracker holds generators of ours; before a replay they take over its states, and
    give them back after it, so that graphs and eager work draw the same numbers.
    """

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}
        self._for_recomputing: list[torch.Generator] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[torch.Generator]]:
        """Around a capture; yields the generators that the graph must be told of."""
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
            yield [*self._generators.values(), *self._for_recomputing]
        finally:
            tracker.states_, tracker.use_cudagraphable_rng = states, was_safe

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a replay that draws."""
        tracker = get_cuda_rng_tracker()
        for name, generator in self._generators.items():
            generator.set_state(tracker.states_[name])
        yield
        for name, generator in self._generators.items():
            tracker.states_[name] = generator.get_state()

    def recomputed(self, forward: Callable[[], Any]) -> RecomputedDraws:
        """Prepare for a captured backward that runs parts of ``forward`` again.

        Args:
            forward: runs the forward once, eagerly; the random states are then as before.
        """
        draws = RecomputedDraws(forward)
        self._for_recomputing += draws.generators()
        return draws


_DEFAULT = ""
"""Stands for the device's default generator among the tracker's names."""


@dataclass(frozen=True)
class _Draw:
    """A generator for one state of one recomputed part: at ``offset`` from where the state
    ``source`` is when the forward begins.
    """

    source: str
    offset: int
    generator: torch.Generator


class RecomputedDraws:
    """Lets a captured backward draw again what its forward drew.

    megatron-core saves the random states where a recomputed part of the forward begins, and returns
    to them in the backward. A captured backward cannot return to a state, but it can draw from a
    generator of its own: each recomputed part has one per state of the tracker, which is set before
    the backward is replayed to where the forward had come.

    Args:
        forward: see :meth:`CapturedRng.recomputed`.

    Raises:
        TypeError: the tracker's states are generators (``--te-rng-tracker``).
    """

    def __init__(self, forward: Callable[[], Any]) -> None:
        begun = self.states()
        parts: list[dict[str, torch.Tensor]] = []
        with _unchanged_states(), _answering(lambda: parts.append(self.states())):
            forward()
            end = self.states()
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
        """All of them; a graph that draws from one must know it."""
        return [draw.generator for part in self._parts for draw in part.values()]

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """Around the capture of a forward: its recomputed parts keep our generators."""
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
        """Before a replay of the backward whose forward began with these states."""
        for part in self._parts:
            for draw in part.values():
                state = begun[draw.source].clone()
                state.view(torch.int64)[1] += draw.offset
                draw.generator.set_state(state)


def _source(name: str, state: torch.Tensor, begun: dict[str, torch.Tensor]) -> str:
    """Whose state this is: where the tracker has switched, the default generator has another's."""
    seed = int(state.view(torch.int64)[0])
    alike = [known for known in begun if int(begun[known].view(torch.int64)[0]) == seed]
    return name if name in alike else alike[0]


def _offset(state: torch.Tensor) -> int:
    """How far a CUDA generator has come: of the two integers that are its state, the second; the
    first is its seed.
    """
    return int(state.view(torch.int64)[1])


def _default_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _new_generator() -> torch.Generator:
    return _default_generator().clone_state()


def _answering(answer: Callable[[], Any]) -> AbstractContextManager[None]:
    """megatron-core's question for all random states, at the start of a recomputed part, is
    answered by ``answer``; by itself where that returns None.
    """
    return compat.patched(_STATES, lambda itself: answer() or itself())


@contextlib.contextmanager
def _unchanged_states() -> Iterator[None]:
    """Whatever is drawn meanwhile is forgotten."""
    saved = compat.lookup(_STATES)()
    try:
        yield
    finally:
        compat.lookup("tensor_parallel.random:_set_all_rng_states")(*saved)
