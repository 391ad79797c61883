"""The real ``torch_dist`` format in one process, for tests of saves.

megatron-core's writers are forks, whose calls a test does not see. Here each runs in the test's own
process when it is started.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

from megatron.dpp.core import cpu
from megatron.dpp_train.checkpoint import writers


class _Run:
    """A process that runs at once; its errors end it alone."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._work = partial(target, *args, **kwargs or {})

    def start(self) -> None:
        with suppress(Exception):
            self._work()

    def join(self) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@contextmanager
def alone() -> Iterator[None]:
    """One rank, and so no other to exchange plans with."""
    with nullcontext() if torch.cuda.is_available() else closing(cpu.install()):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def write_here(patch: pytest.MonkeyPatch) -> None:
    """Let writers run in this process."""
    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, Process=_Run)
    for module in (filesystem_async, async_utils):
        patch.setattr(module, "mp", SimpleNamespace(get_context=lambda kind: context))
    patch.setattr(filesystem_async, "_results_queue", queue.Queue())  # not another process's
    patch.setattr(writers, "end_with_parent", lambda: None)


def sharded(name: str, value: int) -> Any:
    """A tensor of a few elements that all are ``value``."""
    tensor = torch.full((9,), float(value))
    return dist_checkpointing.ShardedTensor.from_rank_offsets(name, tensor)


def held(folder: Path, *names: str) -> set[int]:
    """The iteration that a checkpoint has in its common part, and the values of these tensors."""
    state = dist_checkpointing.load({name: sharded(name, 0) for name in names}, str(folder))
    return {state["iteration"], *(int(each) for name in names for each in state[name].unique())}
