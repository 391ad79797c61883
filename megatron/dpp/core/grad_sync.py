"""The reduction of gradients over data-parallel replicas in one call of a schedule.

Under megatron-core's schedules a DistributedDataParallel reduces a bucket from the hooks of the
last microbatch. The dynamic order is not the same on all replicas, so :class:`GradSync` keeps the
hooks from it, and starts reductions in one order, chunk v-1 .. 0, as each chunk is complete. What a
host keeps from being reduced in a call stays so (decision 0021 in docs/decisions/gpu.md).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.dpp.core.call import StepCall
from megatron.dpp.errors import ConfigError


def replicated(chunk: torch.nn.Module) -> list[Any]:
    """The DistributedDataParallel modules of a chunk: itself, the one that a host's wrapper holds,
    or those of several of its parts.
    """
    module: Any = chunk
    while module is not None and not isinstance(module, DistributedDataParallel):
        module = getattr(module, "module", None)
    if module is not None:
        return [module]
    return [part for part in chunk.modules() if isinstance(part, DistributedDataParallel)]


def bucket_groups(ddp: Any) -> list[Any]:
    """All bucket groups of a DistributedDataParallel, those of experts last."""
    return list(ddp.bucket_groups + ddp.expert_parallel_bucket_groups)


class GradSync:
    """The reductions of one call's gradients, where they overlap the backward.

    Args:
        call: the arguments of the schedule. Its model's ``no_sync_func`` and ``grad_sync_func`` are
            used as megatron-core uses them.
    """

    def __init__(self, call: StepCall) -> None:
        self._call, self._config = call, call.config
        self._around = contextlib.ExitStack()
        self._ddps = [
            [ddp for ddp in replicated(chunk) if ddp.ddp_config.overlap_grad_reduce]
            for chunk in ([] if call.forward_only else call.model)
        ]
        self._groups = [
            group for each in self._ddps for ddp in each for group in bucket_groups(ddp)
        ]
        self._reduced: dict[Any, bool] = {}
        """By bucket group: True if its gradients may be reduced from the last microbatch on."""
        self._always: dict[Any, bool] = {}
        """Likewise: True if megatron-core's schedule counts the gradients of every microbatch."""
        self._num_complete = 0

    def open(self) -> None:
        """Enter the host's ``no_sync_func``, and keep hooks from starting reductions.

        Raises:
            ConfigError: an earlier call's gradients are still being reduced.
        """
        if any(group.grad_reduce_handle is not None for group in self._groups):
            raise ConfigError(
                "gradients of an earlier call are still being reduced, and this one would add to "
                "them. Finish them first (finalize_model_grads); for calls whose gradients are "
                "only accumulated, set finalize_model_grads_func to None or use the model's "
                "no_sync()"
            )
        given = self._config.no_sync_func
        functions = given if isinstance(given, list) else [given] if given is not None else []
        if self._groups:
            with contextlib.ExitStack() as tried:  # the last microbatch's hooks run after it
                for function in functions:
                    tried.enter_context(function())
                self._always = self._flags()
            self._reduced = self._flags()
        for function in functions:
            self._around.enter_context(function())
        self._set(dict.fromkeys(self._groups, False))

    def close(self) -> None:
        """Leave the host's ``no_sync_func``, and let hooks start reductions as before."""
        self._around.close()
        self._set(self._reduced)

    def complete(self, chunk: int) -> None:
        """Start the reduction of a chunk's complete gradients, if it overlaps.

        Data-parallel replicas must issue collectives in one order: chunks are reduced as v-1..0.
        """
        model = self._call.model
        if chunk != len(model) - 1 - self._num_complete:
            raise AssertionError(f"chunk {chunk} is complete before chunk {chunk + 1}")
        self._num_complete += 1
        sync = self._config.grad_sync_func
        if sync is not None:
            (sync[chunk] if isinstance(sync, list) else sync)(model[chunk].parameters())
            return
        for ddp in self._ddps[chunk]:
            everywhere = self._call.force_all_reduce or ddp.force_all_reduce
            for group in bucket_groups(ddp):
                if self._reduced.get(group, True):
                    self._reduce(group, ddp, everywhere)

    def _reduce(self, group: Any, ddp: Any, everywhere: bool) -> None:
        """Start a bucket group's reduction if this call ends with it.

        Where the host finishes gradients itself, it may call the schedule again before: then DDP
        decides as under megatron-core's schedule, by the number of times that gradients were added.
        In its first step it reduces at the end.
        """
        if self._config.finalize_model_grads_func is None:
            if not group.is_first_batch:
                self._count(group, everywhere)
        # In the first step DDP starts it once more at the end, unless a handle tells that it has
        # begun; between several optimizer instances there is none.
        elif ddp.ddp_config.num_distributed_optimizer_instances == 1 or not group.is_first_batch:
            group.start_grad_sync(force_all_reduce=everywhere)

    def _count(self, group: Any, everywhere: bool) -> None:
        """Tell DDP of the gradients of all microbatches that megatron-core's schedule counts."""
        group.is_last_microbatch = True
        for _ in range(self._call.num_whole if self._always[group] else 1):
            for parameter in group.params:
                group.register_grad_ready(parameter, everywhere)
        group.is_last_microbatch = False

    def _flags(self) -> dict[Any, bool]:
        return {group: bool(group.is_last_microbatch) for group in self._groups}

    def _set(self, flags: dict[Any, bool]) -> None:
        for group, last in flags.items():
            group.is_last_microbatch = last
