"""The GPU side of bench_lengths.py: a real GPT over sequences of unlike length.

Every arm runs the same sequences. In each turn an arm runs a batch once untimed, since new lengths
make the allocator grow, and then timed. A microbatch that two arms share must have the same loss to
the last bit; the mean loss of a batch differs between packed and other rows by rounding.

``profiling/shared_gpus`` runs both ranks on one GPU: losses and memory are the same, times are not.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import arms
import harness
import torch
import torch.distributed as dist
from bench_gpt import Model, Sequences
from lengths_plans import Plans, drawn_batches, longest_of, mean_tokens

from megatron.dpp.config import DppConfig
from megatron.dpp.sim.lengths import LengthCosts

_LONGEST = 65536
"""Longest sequence that runs unless ``--sequence`` says otherwise."""


@dataclass(frozen=True)
class Arm:
    """A schedule, and the plan of its microbatches.

    Args:
        plan: one of :data:`lengths_plans.PLANS`.
        kind: a name of :data:`arms.ARMS`.
        weights_last: deferred weight gradients run where nothing else can, under any cap.
    """

    plan: str
    kind: str = arms.STATIC
    weights_last: bool = False

    def schedule(self, args: argparse.Namespace) -> Any:
        from megatron.dpp import DppSchedule
        from megatron.dpp.runtime.static import StaticSchedule

        if self.static:
            transport = "cuda_ipc" if self.kind == arms.LINKS else args.static_transport
            return StaticSchedule(DppConfig(cuda_graphs="off", transport=transport))
        schedule = DppSchedule(arms.ARMS[self.kind].config(cuda_graphs="off"))
        if self.weights_last:
            schedule.policy = _weights_last
        return schedule

    @property
    def static(self) -> bool:
        """True for megatron-core's own schedule."""
        return arms.ARMS[self.kind].policy is None

    def microbatches(self, plans: Plans) -> list[Sequences]:
        """The sequences of each microbatch, in order."""
        _, found = plans.planned("static" if self.static else "ours", self.plan)
        return [Sequences(*map(tuple, each)) for each in zip(found, plans.of(found), strict=True)]


def _weights_last(view: Any) -> Any:
    """The policy ``dynamic`` without what it does under the cap ``static``."""
    from megatron.dpp.schedule.policies import dynamic

    view.weights_first = False
    return dynamic(view)


ARMS = {
    "static drawn": Arm("drawn"),
    "static sorted": Arm("sorted"),
    "static packed": Arm("packed"),
    "static best": Arm("best"),
    **{
        f"{start} {plan}{end}": Arm(plan, kind)
        for plan in ("drawn", "sorted", "packed", "best")
        for start, end, kind in (
            ("static", ", links", arms.LINKS),
            ("megatron", "", "megatron"),
            ("fused", "", "fused"),
            ("ours", ", cap static", "dynamic, cap static"),
            ("ours", "", "dynamic"),
        )
    },
    **{
        f"W last {plan}, cap static": Arm(plan, "dynamic, cap static", weights_last=True)
        for plan in ("drawn", "sorted", "packed")
    },
}
_USUAL = (
    "static drawn",
    *(name for name, arm in ARMS.items() if arm.plan == "packed" and not arm.weights_last),
    "ours drawn, cap static",
)  # fmt: skip
"""Arms that run unless ``--arms`` names some."""


@dataclass
class Found:
    """The measurements of one arm."""

    losses: list[dict[Sequences, float]]
    """Of each microbatch of each batch."""
    reserved: float
    allocated: float
    times: list[float] = field(default_factory=list)

    def mean_losses(self) -> list[float]:
        """The mean loss of a token, of each batch."""
        found = []
        for batch in self.losses:
            total = sum(loss * sum(each.lengths) for each, loss in batch.items())
            found.append(total / sum(sum(each.lengths) for each in batch))
        return found


def run(args: argparse.Namespace) -> None:
    """Measure all arms on this rank's GPU; rank 0 prints the table."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    args.sequence = args.sequence or min(longest_of(args.lengths), _LONGEST)
    model = Model(args, args.chunks, None)
    model.config.variable_seq_lengths = True
    model.config.moe_token_dispatcher_type = "alltoall"  # megatron-core asks for it beside that
    costs = LengthCosts.transformer(args.hidden)
    batches = drawn_batches(args, longest=args.sequence, costs=costs)
    chosen = {name: ARMS[name] for name in (args.arms.split(";") if args.arms else _USUAL)}
    schedules = {name: arm.schedule(args) for name, arm in chosen.items()}
    plans = {name: [arm.microbatches(batch) for batch in batches] for name, arm in chosen.items()}
    found: dict[str, Found] = {}
    for name in chosen:
        if dist.get_rank() == 0:
            print(f"first steps: {name}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses = [_step(model, schedules[name], each)[1] for each in plans[name]]
        peaks = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        found[name] = Found(losses, *harness.over_ranks(*peaks, device="cuda"))
    for _ in range(args.rounds):
        for number in range(args.batches):
            for name in chosen:
                _step(model, schedules[name], plans[name][number])
                took, _ = _step(model, schedules[name], plans[name][number])
                found[name].times.append(took)
    if dist.get_rank() == 0:
        _report(args, batches, found)
    for schedule in schedules.values():
        schedule.close()
    dist.destroy_process_group()


def _step(
    model: Model, schedule: Any, microbatches: Sequence[Sequences]
) -> tuple[float, dict[Sequences, float]]:
    """Milliseconds of one step on the slowest rank, and the losses of its microbatches."""
    if hasattr(schedule, "announce"):
        schedule.announce([each.tokens for each in microbatches])
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    entries = model.step(schedule, len(microbatches), microbatches)
    torch.cuda.synchronize()
    (slowest,) = harness.over_ranks(time.perf_counter() - start, device="cuda")
    # Only the last rank has losses.
    own = [entry["lm loss"].item() for entry in entries] or [-math.inf] * len(microbatches)
    losses = harness.over_ranks(*own, device="cuda")
    return slowest * 1e3, dict(zip(microbatches, losses, strict=True))


def _report(args: argparse.Namespace, batches: Sequence[Plans], found: dict[str, Found]) -> None:
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}, "
        f"PP={args.ranks} x {args.chunks}, lengths {args.lengths}, at most {args.sequence} tokens, "
        f"{args.batches} batches of {mean_tokens(batches):,.0f} tokens, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n"
    )
    rows = []
    for name, one in found.items():
        ratios = {}
        for other in ("drawn", "sorted", "best"):
            static = found.get(f"static {other}")
            pairs = zip(one.times, static.times, strict=True) if static else ()
            ratios[other] = [a / b for a, b in pairs]
        alike = found.get(f"static {ARMS[name].plan}")
        rows.append(
            (name, f"{statistics.fmean(one.times):.1f}", *(_mean(r) for r in ratios.values()),
             f"{min(ratios['drawn'], default=0):.3f}..{max(ratios['drawn'], default=0):.3f}",
             f"{one.allocated / 1e9:.2f}", f"{one.reserved / 1e9:.2f}",
             f"{one.reserved / alike.reserved:.3f}" if alike else "-",
             *_compared(one, found))
        )  # fmt: skip
    harness.print_table(
        "arm | mean ms | / static drawn | / static sorted | / static best | spread | "
        "peak allocated GB | peak reserved GB | reserved / static of this plan | "
        "losses equal to those of other arms | mean loss off by",
        rows,
    )
    arms.print_gains([*measured(found, args.rounds)])
    facts = {
        name: {**vars(one), "losses": [list(batch.items()) for batch in one.losses]}
        for name, one in found.items()
    }
    harness.write_json(args.json, {"batches": [batch.lengths for batch in batches], "arms": facts})


def measured(found: dict[str, Found], rounds: int) -> Iterator[arms.Measured]:
    """The arms for the table of gains: a round's time is that of all its batches."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    for name, one in found.items():
        size = len(one.times) // rounds
        times = [sum(one.times[i * size : (i + 1) * size]) for i in range(rounds)]
        equal, _ = _compared(one, found)
        arm = ARMS[name]
        if not arm.weights_last:  # no step of the gains leads to it
            yield arms.Measured(arm.kind, arm.plan, queues, times, one.reserved, equal)


def _compared(one: Found, found: dict[str, Found]) -> tuple[str, str]:
    """Microbatches whose loss is equal in all arms that ran them, of those that another arm ran;
    and the largest difference of a batch's mean loss to the first arm's, relative.
    """
    others = [other for other in found.values() if other is not one]
    equal = shared = 0
    for number, batch in enumerate(one.losses):
        for each, loss in batch.items():
            theirs = [o.losses[number][each] for o in others if each in o.losses[number]]
            shared += bool(theirs)
            equal += bool(theirs) and all(other == loss for other in theirs)
    first = next(iter(found.values())).mean_losses()
    pairs = zip(one.mean_losses(), first, strict=True)
    return f"{equal} of {shared}", f"{max(abs(a / b - 1) for a, b in pairs):.1e}"


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.fmean(ratios):.3f}" if ratios else "-"


def options() -> dict[str, Any]:
    """Further options of the command line, with defaults and help."""
    return {
        "hidden": (4096, "of the GPT on GPUs"),
        "heads": 32,
        "layers": 8,
        "vocabulary": 4096,
        "sequence": (0, f"longest sequence on GPUs; 0: of the lengths, at most {_LONGEST}"),
        "batches": (2, "batches drawn"),
        "arms": ("", "arms on GPUs, separated by semicolons: " + ", ".join(ARMS)),
        "static_transport": ("auto", "auto: megatron-core's own exchange; else a kind of channel"),
    }


MODEL = {
    "tensor": 1,
    "sequence_parallel": False,
    "micro_batch": 1,
    "dropout": 0.0,
    "no_gradient_accumulation_fusion": False,
    "experts": 0,
    "expert_parallel": 1,
}
"""What the model of bench_schedule.py asks for beside them."""
