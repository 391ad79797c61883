"""The random state of a task, derived from what the task is and not from when it runs.

Megatron draws dropout masks from generators that advance from task to task, so the masks depend on
the order of execution. A dynamic schedule has no fixed order. ``TaskRng`` therefore seeds every
forward from (seed, iteration, microbatch, stage), for the dynamic and the static schedules alike:
both then draw the same masks. Recomputation in a backward is not touched, because megatron-core
saves and restores the states that its forward used.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_attr_wrapped_model, get_model_config


class TaskRng:
    """Seeds the generators before each forward.

    Args:
        seed: the run's seed, equal on all ranks of a pipeline.
        num_ranks: pipeline size p; a stage's number is ``chunk * p + rank``.
        rank: this process's place in the pipeline.
    """

    def __init__(self, seed: int, num_ranks: int, rank: int) -> None:
        self._seed, self._num_ranks, self._rank = seed, num_ranks, rank

    def wrap(self, forward_step_func: Callable[..., Any], iteration: int) -> Callable[..., Any]:
        """``forward_step_func`` with seeding before it; counts each chunk's microbatches, which run
        in order.
        """
        run_so_far: dict[int, int] = defaultdict(int)

        def seeded(data_iterator: Any, model: torch.nn.Module, *rest: Any) -> Any:
            chunk = _chunk_of(model)
            stage = chunk * self._num_ranks + self._rank
            self._enter(iteration, run_so_far[chunk], stage)
            run_so_far[chunk] += 1
            return forward_step_func(data_iterator, model, *rest)

        return seeded

    def _enter(self, iteration: int, microbatch: int, stage: int) -> None:
        task = (self._seed, iteration, microbatch, stage)
        tracker = get_cuda_rng_tracker()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        for name, state in tracker.states_.items():
            seed = _derive(*task, tp_rank, name=name)
            if isinstance(state, torch.Generator):
                state.manual_seed(seed)
            else:
                torch.cuda.manual_seed(seed)
                tracker.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(_derive(*task))


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


@contextlib.contextmanager
def _answering(answer: Callable[[], Any]) -> Iterator[None]:
    """megatron-core's question for all random states, at the start of a recomputed part, is
    answered by ``answer``; by itself where that returns None.
    """
    original = random._get_all_rng_states
    random._get_all_rng_states = lambda: answer() or original()
    try:
        yield
    finally:
        random._get_all_rng_states = original


@contextlib.contextmanager
def _unchanged_states() -> Iterator[None]:
    """Whatever is drawn meanwhile is forgotten."""
    saved = random._get_all_rng_states()
    try:
        yield
    finally:
        random._set_all_rng_states(*saved)


def needs_task_rng(model: list[torch.nn.Module]) -> bool:
    """Whether a forward of this model draws random numbers in training (dropout, routers)."""
    config = get_model_config(model[0])
    return bool(
        config.hidden_dropout > 0.0
        or config.attention_dropout > 0.0
        or config.moe_input_jitter_eps
        or config.moe_router_force_load_balancing
    )


def _derive(*numbers: int, name: str = "") -> int:
    """A 63-bit seed, equal on every machine, from integers and a name."""
    unsigned = [number & (1 << 64) - 1 for number in numbers]  # PyTorch's initial seed has no sign
    packed = struct.pack(f"<{len(numbers)}Q", *unsigned) + name.encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def _chunk_of(model: torch.nn.Module) -> int:
    try:
        return get_attr_wrapped_model(model, "vp_stage", allow_none=False) or 0
    except RuntimeError:
        return 0
