"""The GPU side of bench_lengths.py: a real GPT over sequences of unlike length.

Every arm runs the same global batches, one sequence per microbatch or packed. In each turn an arm
runs a batch once untimed, since new lengths make the allocator grow, and then timed.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
import torch.distributed as dist
from bench_gpt import Model

from megatron.dpp.config import DppConfig
from megatron.dpp.plan.lengths import pack
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.lengths import MIXES, LengthCosts

Microbatch = tuple[int, ...]
"""Lengths of the sequences of a microbatch; several are packed."""


@dataclass(frozen=True)
class Arm:
    """A schedule, and the order of its microbatches.

    Args:
        order: ``drawn``, ``sorted`` or ``packed`` (even costs, as drawn otherwise).
        cap: as --dpp-activation-cap; None for megatron-core's own schedule.
        split: with tasks of their own for weight gradients.
    """

    order: str
    cap: str | None = None
    split: bool = True

    def schedule(self) -> Any:
        from megatron.dpp import DppSchedule
        from megatron.dpp.runtime.static import StaticSchedule

        if self.cap is None:
            return StaticSchedule(DppConfig(cuda_graphs="off"))
        return DppSchedule(
            DppConfig(cuda_graphs="off", activation_cap=self.cap, split_backward=self.split)
        )

    def microbatches(self, args: argparse.Namespace, drawn: Sequence[int]) -> list[Microbatch]:
        """The lengths of each microbatch, in order."""
        if self.order != "packed":
            return [(n,) for n in (sorted(drawn) if self.order == "sorted" else drawn)]
        costs = [LengthCosts.transformer(args.hidden).time(Kind.F, [n]) for n in drawn]
        num_bins = min(len(drawn), 4 * args.ranks)
        bins = pack(drawn, args.sequence, "even", costs=costs, num_bins=num_bins)
        return [tuple(drawn[index] for index in indices) for indices in bins]


ARMS = {
    "static drawn": Arm("drawn"),
    "static sorted": Arm("sorted"),
    "static packed": Arm("packed"),
    "ours drawn": Arm("drawn", "auto"),
    "ours sorted": Arm("sorted", "auto"),
    "ours packed": Arm("packed", "auto"),
    "ours drawn, cap static": Arm("drawn", "static"),
    "ours sorted, cap static": Arm("sorted", "static"),
    "ours packed, cap static": Arm("packed", "static"),
    "fused drawn": Arm("drawn", "auto", split=False),
}


@dataclass
class Found:
    """The measurements of one arm."""

    losses: list[list[float]]
    """Of each microbatch of each batch."""
    reserved: float
    allocated: float
    times: list[float] = field(default_factory=list)


def run(args: argparse.Namespace) -> None:
    """Measure all arms on this rank's GPU; rank 0 prints the table."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    model = Model(args, args.chunks, None)
    model.config.variable_seq_lengths = True
    model.config.moe_token_dispatcher_type = "alltoall"  # megatron-core asks for it beside that
    rng, draw = random.Random(args.seed), MIXES[args.lengths].draw
    batches = [
        [min(draw(rng), args.sequence) for _ in range(args.microbatches)]
        for _ in range(args.batches)
    ]
    arms = {name: ARMS[name] for name in (args.arms.split(";") if args.arms else ARMS)}
    schedules = {name: arm.schedule() for name, arm in arms.items()}
    found: dict[str, Found] = {}
    for name, arm in arms.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses = [_step(args, model, schedules[name], arm, batch)[1] for batch in batches]
        peaks = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        found[name] = Found(losses, *harness.over_ranks(*peaks, device="cuda"))
    for _ in range(args.rounds):
        for batch in batches:
            for name, arm in arms.items():
                _step(args, model, schedules[name], arm, batch)
                found[name].times.append(_step(args, model, schedules[name], arm, batch)[0])
    if dist.get_rank() == 0:
        _report(args, batches, found)
    for schedule in schedules.values():
        schedule.close()
    dist.destroy_process_group()


def _step(
    args: argparse.Namespace, model: Model, schedule: Any, arm: Arm, batch: Sequence[int]
) -> tuple[float, list[float]]:
    """Milliseconds of one step on the slowest rank, and the losses of its microbatches."""
    microbatches = arm.microbatches(args, batch)
    if arm.cap is not None:
        schedule.announce([sum(lengths) for lengths in microbatches])
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    entries = model.step(schedule, len(microbatches), microbatches)
    torch.cuda.synchronize()
    (slowest,) = harness.over_ranks(time.perf_counter() - start, device="cuda")
    # Only the last rank has losses.
    own = [entry["lm loss"].item() for entry in entries] or [-math.inf] * len(microbatches)
    return slowest * 1e3, harness.over_ranks(*own, device="cuda")


def _report(
    args: argparse.Namespace, batches: Sequence[Sequence[int]], found: dict[str, Found]
) -> None:
    tokens = [sum(batch) for batch in batches]
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}, "
        f"PP={args.ranks} x {args.chunks}, {args.microbatches} sequences of {args.lengths} at most "
        f"{args.sequence} tokens, {args.batches} batches of {statistics.fmean(tokens):,.0f} "
        f"tokens, {torch.cuda.get_device_name()}, torch {torch.__version__}\n"
    )
    rows = []
    for name, one in found.items():
        ratios = {}
        for other in ("drawn", "sorted", "packed"):
            static = found.get(f"static {other}")
            pairs = zip(one.times, static.times, strict=True) if static else ()
            ratios[other] = [a / b for a, b in pairs]
        alike = found.get(f"static {ARMS[name].order}")
        rows.append(
            (name, f"{statistics.fmean(one.times):.1f}", *(_mean(r) for r in ratios.values()),
             f"{min(ratios['drawn'], default=0):.3f}..{max(ratios['drawn'], default=0):.3f}",
             f"{one.allocated / 1e9:.2f}", f"{one.reserved / 1e9:.2f}",
             f"{one.reserved / alike.reserved:.3f}" if alike else "-",
             one.losses == alike.losses if alike else "-")
        )  # fmt: skip
    harness.print_table(
        "arm | mean ms | / static drawn | / static sorted | / static packed | spread | "
        "peak allocated GB | peak reserved GB | reserved / static in this order | losses equal",
        rows,
    )
    harness.write_json(
        args.json, {"batches": batches, "arms": {name: vars(one) for name, one in found.items()}}
    )


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.fmean(ratios):.3f}" if ratios else "-"


def options() -> dict[str, Any]:
    """Further options of the command line, with defaults and help."""
    return {
        "hidden": (4096, "of the GPT on GPUs"),
        "heads": 32,
        "layers": 8,
        "vocabulary": 4096,
        "sequence": (16384, "longest sequence on GPUs"),
        "batches": (4, "length sets on GPUs"),
        "arms": ("", "arms on GPUs, separated by semicolons; all if empty"),
    }


MODEL = {
    "tensor": 1,
    "sequence_parallel": False,
    "micro_batch": 1,
    "dropout": 0.0,
    "recompute": None,
    "no_gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "experts": 0,
    "expert_parallel": 1,
}
"""What the model of bench_schedule.py asks for beside them."""
