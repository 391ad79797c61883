"""The GPU side of bench_lengths.py: a real GPT over sequences of unlike length.

Every arm runs the same global batches, one sequence per microbatch. In each turn an arm runs a
batch once untimed, since new lengths make the allocator grow, and then timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import harness
import torch
import torch.distributed as dist
from bench_gpt import Model

from megatron.dpp.config import DppConfig
from megatron.dpp.sim.lengths import MIXES

ARMS = (
    "static drawn",
    "static sorted",
    "ours drawn",
    "ours sorted",
    "ours 2p drawn",
    "fused drawn",
)


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
    schedules = {arm: _schedule(arm) for arm in ARMS}
    losses: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for arm, schedule in schedules.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses[arm] = [_step(model, schedule, arm, batch)[1] for batch in batches]
        peaks[arm] = harness.over_ranks(torch.cuda.max_memory_reserved(), device="cuda")[0]
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for batch in batches:
            for arm, schedule in schedules.items():
                _step(model, schedule, arm, batch)
                times[arm].append(_step(model, schedule, arm, batch)[0])
    if dist.get_rank() == 0:
        _report(args, batches, times, peaks, losses)
    for schedule in schedules.values():
        schedule.close()
    dist.destroy_process_group()


def _schedule(arm: str) -> Any:
    from megatron.dpp import DppSchedule
    from megatron.dpp.runtime.static import StaticSchedule

    if arm.startswith("static"):
        return StaticSchedule(DppConfig(cuda_graphs="off"))
    cap = "2p" if " 2p " in arm else "auto"
    split = not arm.startswith("fused")
    return DppSchedule(DppConfig(cuda_graphs="off", activation_cap=cap, split_backward=split))


def _step(model: Model, schedule: Any, arm: str, batch: Sequence[int]) -> tuple[float, float]:
    """Milliseconds of one step on the slowest rank, and the sum of its losses."""
    lengths = sorted(batch) if arm.endswith("sorted") else list(batch)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    entries = model.step(schedule, len(lengths), lengths)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    loss = sum(entry["lm loss"].item() for entry in entries)  # 0 but on the last rank
    slowest, loss = harness.over_ranks(took, loss, device="cuda")
    return slowest * 1e3, loss


def _report(
    args: argparse.Namespace,
    batches: Sequence[Sequence[int]],
    times: dict[str, list[float]],
    peaks: dict[str, float],
    losses: dict[str, list[float]],
) -> None:
    tokens = [sum(batch) for batch in batches]
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}, "
        f"PP={args.ranks} x {args.chunks}, {args.microbatches} sequences of {args.lengths} at most "
        f"{args.sequence} tokens, {args.batches} batches of {statistics.fmean(tokens):,.0f} "
        f"tokens, {torch.cuda.get_device_name()}, torch {torch.__version__}\n"
    )
    drawn, ordered = times["static drawn"], times["static sorted"]
    rows = []
    for arm, took in times.items():
        ratios = [a / b for a, b in zip(took, drawn, strict=True)]
        best = [a / b for a, b in zip(took, ordered, strict=True)]
        rows.append(
            (arm, f"{statistics.fmean(took):.1f}", f"{statistics.fmean(ratios):.3f}",
             f"{min(ratios):.3f}..{max(ratios):.3f}", f"{statistics.fmean(best):.3f}",
             f"{peaks[arm] / 1e9:.2f}", f"{losses[arm][0]:.6f}")
        )  # fmt: skip
    harness.print_table(
        "arm | mean ms | / static drawn | spread | / static sorted | peak reserved GB | loss", rows
    )
    harness.write_json(args.json, {"batches": batches, "ms": times, "peaks": peaks, "loss": losses})


def options() -> dict[str, Any]:
    """Further options of the command line, with defaults and help."""
    return {
        "hidden": (4096, "of the GPT on GPUs"),
        "heads": 32,
        "layers": 8,
        "vocabulary": 4096,
        "sequence": (16384, "longest sequence on GPUs"),
        "batches": (4, "length sets on GPUs"),
    }


MODEL = {
    "tensor": 1,
    "sequence_parallel": False,
    "micro_batch": 1,
    "dropout": 0.0,
    "recompute": None,
    "no_gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
}
"""What the model of bench_schedule.py asks for beside them."""
