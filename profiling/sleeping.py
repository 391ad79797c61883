"""Pipelines of stages that sleep instead of compute, shared by the benchmarks on a CPU.

Sleeping stages need no cores, so a machine with two can stand for eight ranks: real processes, the
real executor over the real transport, and megatron-core's own schedules over gloo with the same
sleeps. A chunk's F sleeps ``--sleep-ms``, its B and W the same (a fused backward twice that); the
variability of ``--inject`` multiplies the sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist

from megatron.dpp.config import DppConfig
from megatron.dpp.inject import Injector, Task
from megatron.dpp.schedule import Geometry, Scheduler, parse_cap
from megatron.dpp.trace import NullRecorder

_HIDDEN, _SEQUENCE, _SLOTS = 8, 4, 2
_NUM_BYTES = 4 * _SEQUENCE * _HIDDEN
"""Bytes of a message."""


class _SleepForward(torch.autograd.Function):
    """Passes a tensor on after a sleep, and its gradient back after another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, nap: Any) -> torch.Tensor:
        ctx.nap = nap
        nap("F")
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.nap("B")
        return gradient, None


class SleepingChunk(torch.nn.Module):
    """The parts of a model chunk that megatron-core's schedules use.

    Args:
        naps: sleeps as long as the task (kind, chunk, microbatch) is to take.
    """

    def __init__(self, config: Any, naps: Any, chunk: int) -> None:
        super().__init__()
        self.config, self.vp_stage = config, chunk
        self.model_type = 1
        self._naps, self._chunk = naps, chunk
        self._counts = {"F": 0, "B": 0}
        self._given: torch.Tensor | None = None
        self.start = torch.nn.Parameter(torch.zeros(_SEQUENCE, 1, _HIDDEN))

    def set_input_tensor(self, given: list[torch.Tensor | None]) -> None:
        self._given = given[0]

    def _nap(self, kind: str) -> None:
        self._naps(kind, self._chunk, self._counts[kind])
        self._counts[kind] += 1

    def forward(self) -> torch.Tensor:
        given = self.start if self._given is None else self._given
        return _SleepForward.apply(given, self._nap)


class SleepingRunner:
    """The executor's TaskRunner, asleep; ``naps`` as for :class:`SleepingChunk`."""

    def __init__(self, naps: Any) -> None:
        self._naps = naps

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        return self._slept("F", chunk, microbatch)

    def free_output(self, chunk: int, microbatch: int) -> None:
        pass

    def backward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        return self._slept("B", chunk, microbatch)

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        self._naps("W", chunk, microbatch)

    def chunk_complete(self, chunk: int) -> None:
        pass

    def _slept(self, kind: str, chunk: int, microbatch: int) -> torch.Tensor:
        self._naps(kind, chunk, microbatch)
        return torch.zeros(_SEQUENCE, 1, _HIDDEN)


class Naps:
    """Sleeps as long as a task of this rank is to take, and adds up what it slept."""

    def __init__(
        self, args: argparse.Namespace, num_chunks: int, iteration: int, *, fused: bool
    ) -> None:
        self._unit = args.sleep_ms * 1e-3
        self._fused, self._iteration, self._work = fused, iteration, 0.0
        self._num_chunks = num_chunks
        self._injector = injector_of(args, num_chunks)
        self.total = 0.0

    def __call__(self, kind: str, chunk: int, microbatch: int) -> None:
        units = 2 if kind == "B" and self._fused else 1
        seconds, cost = units * self._unit, units / self._num_chunks
        if self._injector is not None:
            task = Task(self._iteration, kind, chunk, microbatch, self._work, cost)
            seconds *= self._injector.factor(task)
        self._work += cost
        self.total += seconds
        _sleep_exactly(seconds)


def _sleep_exactly(seconds: float) -> None:
    """Sleep, correcting for the kernel's habit of waking a little late."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - 1e-4) if left > 2e-4 else 0)


def injector_of(args: argparse.Namespace, v: int) -> Injector | None:
    return Injector(args.inject, dist.get_rank(), args.ranks, num_chunks=v) if args.inject else None


def megatron_step(
    num_ranks: int, v: int, m: int, chunk: Callable[[Any, int], torch.nn.Module]
) -> None:
    """Runs one step of megatron-core's own schedule; ``chunk`` makes a model chunk from the
    configuration and its number.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=num_ranks * v,
        hidden_size=_HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=v > 1,
        batch_p2p_comm=v == 1,
    )
    model = [chunk(config, number) for number in range(v)]

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> Any:
        return chunk(), lambda output: (output.sum(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * v if v > 1 else None,
        model=model if v > 1 else model[0],
        num_microbatches=m,
        seq_length=_SEQUENCE,
        micro_batch_size=1,
    )


def open_exchange(num_ranks: int, transport: str, injector: Any) -> Any:
    """Our channels for a static schedule; an injector may slow them down."""
    from megatron.dpp.runtime.delayed import delayed
    from megatron.dpp.runtime.links import open_links
    from megatron.dpp.runtime.static import ChannelExchange, ring_channels

    ranks = tuple(range(num_ranks))
    specs = ring_channels(ranks, dist.get_rank(), _NUM_BYTES, _SLOTS)
    opened = open_links(specs, DppConfig(transport=transport))
    return ChannelExchange(delayed(opened, injector, ranks), 60.0)


class DynamicPipeline:
    """The real executor over real channels, with or without the slow links of an injector.

    Args:
        args: the command line.
        v: chunks per rank.
        injector: gives the delays of messages; without one, that of ``--inject``.
        split: whether W runs apart from B.
        policy, cap: as ``--dpp-policy`` and ``--dpp-activation-cap``; without a cap, ``--cap``.
        traced: whether ``--trace-dir`` gets a file per rank.
        pieces: of each W.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        v: int,
        injector: Any = None,
        *,
        split: bool = True,
        policy: str = "dynamic",
        cap: str = "",
        traced: bool = False,
        pieces: int = 1,
    ) -> None:
        from megatron.dpp.runtime.delayed import delayed
        from megatron.dpp.runtime.links import Links, open_links
        from megatron.dpp.runtime.topology import Topology

        self.num_chunks, self.split, self.pieces = v, split, pieces
        self._policy, self._cap = policy, cap or args.cap
        topology = Topology(tuple(range(args.ranks)), dist.get_rank(), v)
        specs = topology.channels([_NUM_BYTES], [_NUM_BYTES], _SLOTS)
        opened = open_links(specs, DppConfig(transport=args.transport))
        injector = injector or injector_of(args, v)
        self.links = Links(delayed(opened, injector, topology.ranks), topology)
        self.recorder = (
            harness.open_trace(args.ranks, v, args.trace_dir) if traced else NullRecorder()
        )

    def step(self, args: argparse.Namespace, m: int, iteration: int, runner: Any = None) -> float:
        """Run ``m`` microbatches; seconds this rank's tasks slept. ``runner`` does not sleep."""
        from megatron.dpp.runtime.executor import Executor, Iteration
        from megatron.dpp.runtime.timer import TaskTimer

        v, split = self.num_chunks, self.split
        pieces = (self.pieces,) * v if split else None
        geometry = Geometry(args.ranks, dist.get_rank(), v, m, w_pieces=pieces)
        cap = parse_cap(self._cap, geometry).chunks
        scheduler = Scheduler(geometry, policy=self._policy, cap=cap, split_backward=split)
        naps = Naps(args, v, iteration, fused=not split)
        self.recorder.begin_iteration(iteration)
        Executor(
            runner=runner or SleepingRunner(naps),
            scheduler=scheduler,
            links=self.links,
            recorder=self.recorder,
            timer=TaskTimer(),
            injector=None,
            iteration=Iteration(number=iteration, timeout=60.0),
        ).run()
        self.recorder.end_iteration()
        return naps.total

    def close(self) -> None:
        self.recorder.close()
        self.links.transport.close()


@contextlib.contextmanager
def cpu_rank() -> Any:
    """This process as a rank on the CPU."""
    from megatron.dpp.core import cpu

    support = cpu.install()
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    support.close()
