"""Shapes at the boundaries between stages, learnt from one forward of each stage.

PyTorch's schedules learn them likewise. The ranks tell each other through torch.distributed's
store, once per schedule: later microbatches of other lengths need bytes in proportion.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from megatron.dpp.errors import ConfigError, PeerDead, from_json, one_line, setting, to_json
from megatron.dpp.torch.microbatches import Microbatches

_NAP_SECONDS = 0.005


class Boundary(NamedTuple):
    """The tensors that a stage hands to the next one: their shapes, their dtypes, and which of them
    take a gradient.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    def __str__(self) -> str:
        each = zip(self.dtypes, self.grads, strict=True)
        return ", ".join(f"{dtype}{'' if grad else ' without gradient'}" for dtype, grad in each)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Boundary:
        """The boundary that these tensors cross."""
        each = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
        return cls(*zip(*each, strict=True))

    def zeros(self, device: torch.device | str) -> list[torch.Tensor]:
        """Tensors like those that cross it, which the next stage receives."""
        return [
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)
            for shape, dtype, grad in zip(*self, strict=True)
        ]


def outputs_of(stage: PipelineStage, output: Any) -> list[torch.Tensor]:
    """The tensors that a stage hands on.

    Raises:
        ConfigError: it returned something else.
    """
    outputs = list(output) if isinstance(output, tuple | list) else [output]
    plain = [isinstance(each, torch.Tensor) and not isinstance(each, DTensor) for each in outputs]
    if not outputs or not all(plain):
        found = ", ".join(type(each).__name__ for each in outputs) or "no tensor"
        raise ConfigError(
            f"stage {stage.stage_index} returned {found}: a stage that is not the last has to "
            "return a plain tensor, or a tuple of them"
        )
    return outputs


class Shapes(NamedTuple):
    """The boundaries behind each stage but the last, of a microbatch of ``size``."""

    size: int
    boundaries: tuple[Boundary, ...]

    @property
    def num_tensors(self) -> int:
        """Messages per microbatch: the most tensors of any boundary."""
        return max((len(each.shapes) for each in self.boundaries), default=1)

    def slot_bytes(self, size: int) -> int:
        """Bytes of the largest tensor of a microbatch of ``size``."""
        tensors = [each for boundary in self.boundaries for each in boundary.zeros("meta")]
        most = max((tensor.nbytes for tensor in tensors), default=0)
        return -(-most * size // self.size)


class Probe:
    """Learns a pipeline's shapes, together with the same call on its other ranks. They meet under a
    key of the job's store, and wait for ``timeout`` seconds for each other.

    Args:
        ranks: of the pipeline, in its order.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], ranks: Sequence[int], timeout: float
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._num_stages, self._ranks, self._timeout = stages[0].num_stages, ranks, timeout
        self._store = dist.distributed_c10d._get_default_store()
        key = f"dpp/torch/{','.join(map(str, ranks))}"
        self._key = f"{key}#{self._store.add(f'{key}/{dist.get_rank()}', 1)}"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        self._host = boot, os.stat("/proc/self/ns/pid").st_ino
        self.tell(f"process of {dist.get_rank()}", (self._host, os.getpid()))

    def tell(self, name: str, value: Any) -> None:
        """Tell all ranks something."""
        self._store.set(f"{self._key}/{name}", pickle.dumps(value))  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that wait in :meth:`told` why this one ends."""
        with contextlib.suppress(RuntimeError, ValueError):  # the store or the group is gone
            text = f"rank {dist.get_rank()} gave up: {type(error).__name__}: {one_line(error, 200)}"
            self._store.compare_set(f"{self._key}/failed", "", to_json(text))  # the first one stays

    def told(self, name: str, place: int) -> Any:
        """Wait for what the rank at this place of the pipeline tells.

        Raises:
            PeerDead: a rank failed, or this one died or does not tell in time.
        """
        key, failed, rank = f"{self._key}/{name}", f"{self._key}/failed", self._ranks[place]
        deadline = time.monotonic() + self._timeout
        while True:
            dead = self._dead(rank)  # before the looks at what it told
            if self._store.check([key]):
                return pickle.loads(self._store.get(key))
            if self._store.check([failed]):
                reason = from_json(self._store.get(failed).decode())
                raise PeerDead(reason, reason)
            if dead:
                raise PeerDead(
                    f"rank {dist.get_rank()}: rank {rank} ({dead}) died before its first step"
                )
            if time.monotonic() > deadline:
                timeout = setting("timeout")
                raise PeerDead(
                    f"rank {rank} has told nothing of its shapes for {self._timeout:g} s: it died, "
                    f"or is slower than {timeout} allows",
                    timeout,
                )
            time.sleep(_NAP_SECONDS)

    def _dead(self, rank: int) -> str:
        """The process of a rank of this host that has ended; else empty."""
        key = f"{self._key}/process of {rank}"
        host, pid = pickle.loads(self._store.get(key)) if self._store.check([key]) else (None, 0)
        try:
            if host != self._host or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return ""
        except psutil.NoSuchProcess:
            pass
        return f"pid {pid}"

    def run(self, microbatches: Microbatches, number: int, size: int) -> Shapes:
        """The shapes of a microbatch.

        Args:
            number: of the microbatch, the same on all ranks.
            size: its size.
        """
        boundaries: list[Boundary] = []
        for index in range(self._num_stages - 1):
            if stage := self._stages.get(index):
                self.tell(str(index), self._measure(stage, microbatches, number, boundaries))
            boundaries.append(self.told(str(index), index % len(self._ranks)))
        return Shapes(size, tuple(boundaries))

    def _measure(
        self,
        stage: PipelineStage,
        microbatches: Microbatches,
        number: int,
        before: Sequence[Boundary],
    ) -> Boundary:
        args = before[-1].zeros(stage.device) if before else microbatches.arguments(number)
        devices = [stage.device] if stage.device.type != "cpu" else []
        with (
            torch.random.fork_rng(devices, device_type=stage.device.type if devices else "cuda"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            keywords = microbatches.keywords(number)
            output: Any = stage.forward_maybe_with_nosync(*args, **keywords)  # type: ignore[no-untyped-call]
            found = Boundary.of(outputs_of(stage, output))
        for module in stage.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found
