"""Schedules for microbatches of unlike length: a GPT on GPUs, else stages that sleep.

Real processes, the real executor over the real transport, and megatron-core's own schedule over
gloo with ``variable_seq_lengths``. A task sleeps as long as its sequence of drawn length is to
take; messages have the length's shape. The simulator's prediction stands beside each measurement.
The arms are the static schedule and ours, in the drawn order and in the best of four orders.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import bench_lengths_gpu
import harness
import torch
import torch.distributed as dist
from bench_sleeping import (
    SleepingChunk,
    SleepingRunner,
    _sleep_exactly,
    _SleepForward,
    cpu_rank,
    megatron_step,
)

from megatron.dpp.config import DppConfig
from megatron.dpp.plan.lengths import best_order, orders
from megatron.dpp.schedule import Geometry, Kind, Scheduler, parse_cap
from megatron.dpp.sim import Costs, ScheduleConfig, Shape, run_static
from megatron.dpp.sim.lengths import MIXES, LengthCosts
from megatron.dpp.trace import NullRecorder

_HIDDEN = 8


class Batch:
    """One iteration's microbatches in an order: their lengths, and what each task is to take.

    Args:
        lengths: in tokens.
        longest: most tokens that the mix may give.
    """

    def __init__(self, args: argparse.Namespace, lengths: Sequence[int], longest: int) -> None:
        self.lengths, p, v = lengths, args.ranks, args.chunks
        self.shape = Shape(p, v, len(lengths), tuple(lengths), longest)
        costs = LengthCosts.transformer().of([[n] for n in lengths], num_ranks=p, num_chunks=v)
        seconds = args.forward_ms * 1e-3 * v
        scaled = [[[t * seconds for t in row] for row in kind] for kind in costs.durations]
        self.costs = Costs((scaled[0], scaled[1], scaled[2]), costs.hops)

    def predicted(self, arm: str) -> float:
        """Seconds of the simulated iteration."""
        if arm == "static":
            name = "interleaved" if self.shape.num_chunks > 1 else "1f1b"
            return run_static(name, self.shape, self.costs).makespan
        return ScheduleConfig().run(self.shape, self.costs).makespan


class Naps:
    """Sleeps as long as a task of this rank is to take."""

    def __init__(self, batch: Batch, *, fused: bool) -> None:
        self._batch, self._fused = batch, fused

    def __call__(self, kind: str, chunk: int, microbatch: int) -> None:
        stage = chunk * self._batch.shape.num_ranks + dist.get_rank()
        times = self._batch.costs.durations
        seconds = times[Kind[kind]][stage][microbatch]
        if kind == "B" and self._fused:
            seconds += times[Kind.W][stage][microbatch]
        _sleep_exactly(seconds)


class Chunk(SleepingChunk):
    """A chunk of megatron-core's schedule whose tensors have their microbatch's length."""

    def __init__(self, config: Any, naps: Any, chunk: int, lengths: Sequence[int]) -> None:
        super().__init__(config, naps, chunk)
        self._lengths = lengths

    def forward(self) -> torch.Tensor:
        given = self._given
        if given is None:
            given = self.start[:1].expand(self._lengths[self._counts["F"]], 1, _HIDDEN)
        return _SleepForward.apply(given, self._nap)  # type: ignore[no-any-return]


class Runner(SleepingRunner):
    """The executor's runner; its tensors have their microbatch's length."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(Naps(batch, fused=False))  # type: ignore[arg-type]
        self._lengths = batch.lengths

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        super().forward(chunk, microbatch, received)
        return torch.zeros(self._lengths[microbatch], 1, _HIDDEN)

    def backward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        super().backward(chunk, microbatch, received)
        return torch.zeros(self._lengths[microbatch], 1, _HIDDEN)


def static_step(args: argparse.Namespace, batch: Batch) -> None:
    """One step of megatron-core's own schedule."""
    naps = Naps(batch, fused=True)
    megatron_step(
        args.ranks, args.chunks, len(batch.lengths), batch.shape.largest,
        lambda config, chunk: Chunk(config, naps, chunk, batch.lengths),
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
    )  # fmt: skip


class Ours:
    """The executor over channels whose slots hold the longest microbatch."""

    def __init__(self, args: argparse.Namespace, longest: int) -> None:
        from megatron.dpp.runtime.links import Links, open_links
        from megatron.dpp.runtime.topology import Topology

        topology = Topology(tuple(range(args.ranks)), dist.get_rank(), args.chunks)
        slot = longest * _HIDDEN * 4
        channels = topology.channels([slot], [slot], 2)
        config = DppConfig(transport=args.transport)
        self._links, self._iteration = Links(open_links(channels.specs, config), channels), 0

    def step(self, args: argparse.Namespace, batch: Batch) -> None:
        """Run one iteration."""
        from megatron.dpp.runtime.agreement import decider_for
        from megatron.dpp.runtime.executor import Executor
        from megatron.dpp.runtime.timer import HostTimer

        shape, links = batch.shape, self._links
        geometry = Geometry(shape.num_ranks, dist.get_rank(), args.chunks, shape.num_microbatches)
        cap = parse_cap("auto", geometry).chunks
        scheduler = Scheduler(geometry, cap=cap, largest=shape.largest)
        decider = decider_for(scheduler, links.channels.receiving, None)
        decider.start(links.consumed)
        Executor(
            runner=Runner(batch),
            decider=decider,
            links=links,
            recorder=NullRecorder(),
            timer=HostTimer(),
            injector=None,
            split_backward=True,
            iteration=self._iteration,
            timeout=60.0,
            count_tokens=lambda tensors: tensors.numel() // _HIDDEN,
        ).run()
        links.consume(geometry)
        self._iteration += 1

    def close(self) -> None:
        self._links.transport.close()


def measure(args: argparse.Namespace) -> list[tuple[str, str, float, float]]:
    """Arm, order, predicted and measured seconds of each of the four."""
    from megatron.core import parallel_state

    mix, rng = MIXES[args.lengths], random.Random(args.seed)
    drawn = [mix.draw(rng) for _ in range(args.microbatches)]
    v = args.chunks
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.ranks,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
    )
    ours, rows = Ours(args, mix.longest), []

    def batch(order: Sequence[int]) -> Batch:
        return Batch(args, [drawn[i] for i in order], mix.longest)

    for arm, step in (("static", static_step), ("ours", ours.step)):
        best = best_order(drawn, args.ranks, lambda order, arm=arm: batch(order).predicted(arm))
        for name, order in (("drawn", orders(drawn, args.ranks)["drawn"]), best):
            one = batch(order)
            took = [_seconds(partial(step, args, one)) for _ in range(args.rounds + 1)][1:]
            rows.append((arm, name, one.predicted(arm), statistics.median(took)))
    ours.close()
    parallel_state.destroy_model_parallel()
    return rows


def _seconds(step: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    (seconds,) = harness.over_ranks(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = harness.new_parser(
        __doc__,
        ranks=2,
        chunks=2,
        microbatches=16,
        lengths=("sft", "sft or long"),
        forward_ms=(4.0, "of a chunk's F of the mean microbatch"),
        rounds=3,
        seed=0,
        transport=("auto", "kind of our channels"),
        json=("", "write the rows there"),
        **bench_lengths_gpu.options(),
    )
    args = parser.parse_args()
    vars(args).update(bench_lengths_gpu.MODEL)
    if "RANK" not in os.environ:
        return harness.start_ranks(args.ranks, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    if torch.cuda.is_available():
        bench_lengths_gpu.run(args)
        return 0
    with cpu_rank():
        rows = measure(args)
        if dist.get_rank() == 0:
            print(f"\nPP={args.ranks} x {args.chunks}, {args.microbatches} of {args.lengths}\n")
            static = rows[0]
            harness.print_table(
                "schedule | order | predicted s | measured s | predicted gain | measured gain",
                [
                    (arm, name, f"{guess:.3f}", f"{took:.3f}", f"{static[2] / guess:.2f}",
                     f"{static[3] / took:.2f}")
                    for arm, name, guess, took in rows
                ],
            )  # fmt: skip
            harness.write_json(args.json, {"arguments": vars(args), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
