"""Random states of tasks that do not depend on the order of execution.

Megatron draws dropout masks from generators that advance from task to task. A dynamic schedule has
no fixed order, so ``TaskRng`` seeds every forward from (seed, iteration, microbatch, stage), for
static schedules, too: both draw the same masks. Recomputation needs nothing, as megatron-core
restores the states of the forward. Context-parallel ranks hold different tokens and draw
different numbers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.utils import get_model_config


class TaskRng:
    """Seeds the generators before each forward.

    Args:
        seed: the run's seed, equal on all ranks of a pipeline.
        num_ranks: pipeline size p; a stage's number is ``chunk * p + rank``.
        rank: this process's place in the pipeline.
    """

    def __init__(self, seed: int, num_ranks: int, rank: int) -> None:
        self._seed, self._num_ranks, self._rank = seed, num_ranks, rank

    def wrap(
        self,
        forward_step_func: Callable[..., Any],
        chunks: Sequence[torch.nn.Module],
        iteration: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Callable[..., Any]:
        """``forward_step_func`` with seeding before it. Each chunk's microbatches run in order.

        Args:
            chunks: the rank's model, as its forwards get it, in chunk order.
            wanted: asked before each; False leaves the generators as they are.
        """
        numbers = {id(chunk): number for number, chunk in enumerate(chunks)}
        run_so_far = [0] * len(chunks)

        def seeded(data_iterator: Any, model: torch.nn.Module, *rest: Any, **options: Any) -> Any:
            chunk = numbers[id(model)]
            stage = chunk * self._num_ranks + self._rank
            if wanted():
                self._enter(iteration, run_so_far[chunk], stage)
            run_so_far[chunk] += 1
            return forward_step_func(data_iterator, model, *rest, **options)

        return seeded

    def _enter(self, iteration: int, microbatch: int, stage: int) -> None:
        task: tuple[int, ...] = (self._seed, iteration, microbatch, stage)
        if part := parallel_state.get_context_parallel_rank():
            task += (part,)  # it holds other tokens of the sequence
        tracker = get_cuda_rng_tracker()
        own = parallel_state.get_tensor_model_parallel_rank()
        expert_own = parallel_state.get_expert_tensor_and_model_parallel_rank()
        for name, state in tracker.states_.items():
            of_experts = name == get_expert_parallel_rng_tracker_name()
            seed = derive(*task, expert_own if of_experts else own, name=name)
            if isinstance(state, torch.Generator):
                state.manual_seed(seed)
            else:
                torch.cuda.manual_seed(seed)
                tracker.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(derive(*task))


class Draws:
    """Notices that tasks draw random numbers which the model's config does not name."""

    def __init__(self) -> None:
        self.found = False
        """A task has drawn some."""
        self._before: list[bytes] = []

    def begin(self) -> None:
        """Begin a step: what a host draws between two does not count."""
        self._before = []

    def look(self) -> bool:
        """Look at the generators before a task; True the first time that they have moved."""
        if self.found:
            return False
        states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        states += get_cuda_rng_tracker().get_states().values()
        now = [_read(state) for state in states]
        self.found = bool(self._before) and now != self._before
        self._before = now
        return self.found


def _read(state: Any) -> bytes:
    tensor: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.numpy().tobytes()


def line(*, seeds: bool, named: bool) -> str:
    """The line that tells a user of the random numbers that tasks draw.

    Args:
        seeds: each task derives its own.
        named: the model's config names them.
    """
    if seeds:
        how = (
            "each task derives its own from seed, step, microbatch and stage. A run repeats "
            "itself; megatron-core's schedule draws others"
        )
    else:
        how = "in the order of tasks, which is not the same in every run. No run can be repeated"
    what = "the model draws random numbers"
    if not named:
        what = "forward steps draw random numbers, or move generators, unlike the model's config"
    return f"dynamic pipeline: {what}: {how}"


def needs_task_rng(model: list[torch.nn.Module], *, forward_only: bool = False) -> bool:
    """True if a forward of this model draws random numbers."""
    return draws_numbers(get_model_config(model[0]), forward_only=forward_only)


def draws_numbers(config: Any, *, forward_only: bool = False) -> bool:
    """True if a model of this config draws random numbers: by dropout in training, by routers in
    evaluation too.
    """
    drops_out = config.hidden_dropout > 0.0 or config.attention_dropout > 0.0
    return bool(
        (drops_out and not forward_only)
        or config.moe_input_jitter_eps
        or config.moe_router_force_load_balancing
    )


def derive(*numbers: int, name: str = "") -> int:
    """A 63-bit seed, equal on every machine, from integers and a name."""
    unsigned = [number & (1 << 64) - 1 for number in numbers]  # PyTorch's initial seed has no sign
    packed = struct.pack(f"<{len(numbers)}Q", *unsigned) + name.encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
