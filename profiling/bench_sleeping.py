"""Compare schedules on stages that sleep instead of compute; the CPU half of bench_schedule.py.

Sleeping stages need no cores, so a machine with two can stand for eight ranks: real processes, the
real executor over the real transport, and megatron-core's own schedules over gloo with the same
sleeps. A chunk's F sleeps ``--sleep-ms``, its B and W the same (a fused backward twice that); the
variability of ``--inject`` multiplies the sleeps. The simulator's makespan stands beside each
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_HIDDEN, _SEQUENCE = 8, 4


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
    """What megatron-core's schedules need of a model chunk."""

    def __init__(self, config: Any, nap: Any, stage: int) -> None:
        super().__init__()
        self.config, self.vp_stage = config, stage
        self.model_type = 1
        self._nap = nap
        self._given: torch.Tensor | None = None
        self.start = torch.nn.Parameter(torch.zeros(_SEQUENCE, 1, _HIDDEN))

    def set_input_tensor(self, given: list[torch.Tensor | None]) -> None:
        self._given = given[0]

    def forward(self) -> torch.Tensor:
        given = self.start if self._given is None else self._given
        return _SleepForward.apply(given, self._nap)


class SleepingRunner:
    """The executor's TaskRunner, asleep."""

    def __init__(self, nap: Any, split: bool) -> None:
        self._nap, self._split = nap, split

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        self._nap("F", chunk, microbatch)
        return torch.zeros(_SEQUENCE, 1, _HIDDEN)

    def free_output(self, chunk: int, microbatch: int) -> None:
        pass

    def backward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        self._nap("B", chunk, microbatch)
        return torch.zeros(_SEQUENCE, 1, _HIDDEN)

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        self._nap("W", chunk, microbatch)

    def chunk_complete(self, chunk: int) -> None:
        pass


class Naps:
    """Sleeps as long as a task of this rank is to take, and adds up what it slept."""

    def __init__(
        self, args: argparse.Namespace, rank: int, num_chunks: int, iteration: int, fused: bool
    ) -> None:
        from megatron.dpp.inject import Injector

        self._unit = args.sleep_ms * 1e-3
        self._fused, self._iteration, self._work = fused, iteration, 0.0
        self._num_chunks = num_chunks
        self._injector = (
            Injector(args.inject, rank, args.ranks, num_chunks=num_chunks) if args.inject else None
        )
        self.total = 0.0

    def __call__(self, kind: str, chunk: int, microbatch: int) -> None:
        from megatron.dpp.inject import Task

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


def run_static(args: argparse.Namespace, v: int, m: int, iteration: int) -> float:
    """One step of megatron-core's own schedule; seconds this rank's tasks slept."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    virtual = v if v > 1 else None
    config = TransformerConfig(
        num_layers=args.ranks * v,
        hidden_size=_HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=args.ranks,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=v > 1,
        batch_p2p_comm=v == 1,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    naps = Naps(args, rank, v, iteration, fused=True)
    counts: dict[tuple[str, int], int] = {}

    def nap_of(chunk: int) -> Any:
        def nap(kind: str) -> None:
            number = counts.get((kind, chunk), 0)
            counts[kind, chunk] = number + 1
            naps(kind, chunk, number)

        return nap

    model = [SleepingChunk(config, nap_of(c), c) for c in range(v)]

    def forward_step(iterator: Any, chunk: SleepingChunk) -> Any:
        return chunk(), lambda output: (output.sum(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * v if v > 1 else None,
        model=model if v > 1 else model[0],
        num_microbatches=m,
        seq_length=_SEQUENCE,
        micro_batch_size=1,
    )
    return naps.total


def run_dynamic(
    args: argparse.Namespace, v: int, m: int, iteration: int, links: Any, split: bool, recorder: Any
) -> float:
    """One step of the real executor; seconds this rank's tasks slept."""
    from megatron.dpp.runtime.agreement import decider_for
    from megatron.dpp.runtime.executor import Executor
    from megatron.dpp.runtime.timer import HostTimer
    from megatron.dpp.schedule import Geometry, Scheduler, parse_cap

    rank = dist.get_rank()
    geometry = Geometry(args.ranks, rank, v, m, w_pieces=(1,) * v if split else None)
    cap = parse_cap(args.cap, geometry).chunks
    scheduler = Scheduler(geometry, cap=cap, split_backward=split)
    naps = Naps(args, rank, v, iteration, fused=not split)
    decider = decider_for(scheduler, links.channels.receiving, None)
    decider.start(links.consumed)
    recorder.begin_iteration(iteration)
    Executor(
        runner=SleepingRunner(naps, split),
        decider=decider,
        links=links,
        recorder=recorder,
        timer=HostTimer(),
        injector=None,
        split_backward=split,
        iteration=iteration,
        timeout=60.0,
    ).run()
    recorder.end_iteration()
    links.consume(geometry)
    return naps.total


def open_recorder(args: argparse.Namespace, v: int, traced: bool) -> Any:
    """Where a trace goes: a file per rank for ``traced...`` schedules."""
    from megatron.dpp.trace import NullRecorder, TraceLayout
    from megatron.dpp.trace import open_recorder as open_file

    if not traced:
        return NullRecorder()
    layout = TraceLayout(
        data=0, pipeline=dist.get_rank(), tensor=0,
        data_size=1, pipeline_size=args.ranks, tensor_size=1, num_chunks=v,
    )  # fmt: skip
    return open_file(args.trace_dir, rank=dist.get_rank(), layout=layout)


def open_links(args: argparse.Namespace, v: int, injector: Any = None) -> Any:
    """The channels of a sleeping pipeline, with the slow links of ``injector`` or, without one,
    those that were asked for.
    """
    from megatron.dpp.config import DppConfig
    from megatron.dpp.inject import Injector
    from megatron.dpp.runtime.delayed import DelayedTransport
    from megatron.dpp.runtime.executor import Links
    from megatron.dpp.runtime.links import open_links as open_transport
    from megatron.dpp.runtime.topology import Topology

    topology = Topology(tuple(range(args.ranks)), dist.get_rank(), v)
    slot_bytes = _SEQUENCE * _HIDDEN * 4
    channels = topology.channels([slot_bytes], [slot_bytes], args.slots)
    transport: Any = open_transport(channels.specs, DppConfig(transport=args.transport))
    if injector is None and args.inject:
        injector = Injector(args.inject, dist.get_rank(), args.ranks, num_chunks=v)
    if injector is not None and injector.delays_messages:
        transport = DelayedTransport(transport, injector, topology.ranks)
    return Links(transport, channels)


def open_static(args: argparse.Namespace, v: int) -> Any:
    """Our channels under a static schedule where links are to be slow; None keeps gloo."""
    from megatron.dpp.config import DppConfig
    from megatron.dpp.inject import Injector
    from megatron.dpp.mcore.static import ChannelExchange, ring_channels
    from megatron.dpp.runtime.delayed import DelayedTransport
    from megatron.dpp.runtime.links import open_links as open_transport

    rank, ranks = dist.get_rank(), tuple(range(args.ranks))
    injector = Injector(args.inject, rank, args.ranks, num_chunks=v) if args.inject else None
    if injector is None or not injector.delays_messages:
        return None
    specs = ring_channels(ranks, rank, _SEQUENCE * _HIDDEN * 4, args.slots)
    transport = open_transport(specs, DppConfig(transport=args.transport))
    return ChannelExchange(DelayedTransport(transport, injector, ranks), 60.0)


def measure(args: argparse.Namespace, name: Any, m: int) -> dict[str, Any]:
    """Median seconds of a schedule's step, and its ratio to the busiest rank's own work."""
    from megatron.core import parallel_state

    from megatron.dpp.mcore.static import over_channels

    static, v = name.kind == "static", name.num_chunks
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.ranks,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
    )
    links = None if static else open_links(args, v)
    exchange = open_static(args, v) if static else None
    recorder = open_recorder(args, v, name.mode == "traced")
    took, ratios = [], []
    for iteration in range(args.rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        if links is None:
            with over_channels(exchange) if exchange else contextlib.nullcontext():
                own = run_static(args, v, m, iteration)
        else:
            own = run_dynamic(args, v, m, iteration, links, name.kind == "split", recorder)
        pair = torch.tensor([time.perf_counter() - start, own])
        dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        if iteration:  # the first one warms up
            took.append(float(pair[0]))
            ratios.append(float(pair[0] / pair[1]))
    recorder.close()
    for opened in (links, exchange):
        if opened is not None:
            opened.transport.close()
    parallel_state.destroy_model_parallel()
    return {
        "schedule": name.text,
        "microbatches": m,
        "seconds": statistics.median(took),
        "ratio": statistics.median(ratios),
    }


def worker(args: argparse.Namespace) -> None:
    from megatron.dpp.mcore import cpu

    support = cpu.install()
    dist.init_process_group("gloo")
    rows = [measure(args, name, m) for m in args.microbatches for name in args.names]
    if dist.get_rank() == 0:
        report(args, rows)
    dist.destroy_process_group()
    support.close()


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table, and write JSON when asked to."""
    print(f"\nsleeping stages, PP={args.ranks}, F = {args.sleep_ms} ms, {args.inject or 'quiet'}")
    print("m | schedule | seconds | / busiest rank's own work | static of this v is slower by")
    print("---|---|---|---|---")
    for row in rows:
        v = row["schedule"].lstrip("abcdefghijklmnopqrstuvwxyz")
        same = [
            r["seconds"]
            for r in rows
            if r["schedule"] == f"static{v}" and r["microbatches"] == row["microbatches"]
        ]
        factor = f"{same[0] / row['seconds']:.3f}" if same else "-"
        print(
            f"{row['microbatches']} | {row['schedule']} | {row['seconds']:.3f} | "
            f"{row['ratio']:.3f} | {factor}"
        )
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"arguments": settings, "rows": rows}))


def run(args: argparse.Namespace) -> int:
    """Start one process per rank, or be one of them."""
    if "RANK" in os.environ:
        worker(args)
        return 0
    script = Path(__file__).with_name("bench_schedule.py")
    processes = []
    for rank in range(args.ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29578"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        processes.append(
            subprocess.Popen([sys.executable, str(script), *sys.argv[1:]], env=environment)
        )
    try:
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            process.kill()
