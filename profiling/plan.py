#!/usr/bin/env python
"""Plan which layers lie on which pipeline stage, how many chunks a rank has, and how much it may
hold.

    python profiling/plan.py benchmark/data-1-pipeline-4-tensor-1-dpp --microbatches 8
    python profiling/plan.py costs.json --layers 2,2,2,2,2,2,2,2 --microbatches 32 --memory 80GiB
    python profiling/plan.py --pp 4 --num-layers 16 --hidden-size 4096 --seq-length 2048
    --vocab-size 50304

From a traced run (or a cost file that ``profiling/report.py --costs`` wrote), or from the model's
shapes alone. Prints Megatron's flags of the best plan, what it is predicted to gain, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from megatron.dpp.errors import ConfigError, DppError, exit_with, require  # noqa: E402
from megatron.dpp.plan import (  # noqa: E402
    LayerLayout,
    ModelCosts,
    ModelShape,
    Planner,
    Prediction,
    RunShape,
    costs_of_run,
    even_layers,
    from_run,
    known_gpu,
    planning_costs,
)
from megatron.dpp.sim import MeasuredCosts  # noqa: E402

_MOST_JITTER = 5.0
"""As the simulator takes; with more, factors leave the range of floating point."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("run", nargs="?", help="directory of a traced run, or a cost file")
    add("--layers", help="layers of each stage of that run, as in 2,2,2,1 (default: all alike)")
    add("--num-layers", type=int, help="transformer layers of the model")
    add("--pp", type=int, help="pipeline ranks (default: the run's)")
    add("--microbatches", type=int, default=8, help="microbatches of an iteration (default 8)")
    add("--chunks", default="1,2,4", help="numbers of chunks to try (default 1,2,4)")
    add("--memory", help="memory of a rank for all of weights, optimizer and activations, as 80GiB")
    add("--split-backward", action=argparse.BooleanOptionalAction, default=True)
    shapes = parser.add_argument_group("the model's shapes (for memory too, beside a run)")
    shapes.add_argument("--hidden-size", type=int)
    shapes.add_argument("--ffn-hidden-size", type=int)
    shapes.add_argument("--seq-length", type=int)
    shapes.add_argument("--vocab-size", type=int)
    shapes.add_argument("--micro-batch-size", type=int, default=1)
    shapes.add_argument("--swiglu", action="store_true")
    shapes.add_argument("--tensor-parallel", type=int, default=1)
    shapes.add_argument("--sequence-parallel", action="store_true", help="with --tensor-parallel")
    shapes.add_argument("--cross-entropy-loss-fusion", action="store_true")
    tflops = "of matrix products on a GPU (default 710)"
    shapes.add_argument("--tflops", type=float, default=710.0, help=tflops)
    shapes.add_argument("--jitter", type=float, default=0.0, help="spread of task times to assume")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after an error."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except (DppError, OSError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 1
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing, by their flags."""
    for name in ("num_layers", "pp", "microbatches", "hidden_size", "ffn_hidden_size",
                 "seq_length", "vocab_size", "micro_batch_size", "tensor_parallel"):  # fmt: skip
        value = getattr(args, name)
        require(value is None or value >= 1, f"{_flag(name)} {value}: must be at least 1")
    require(0 < args.tflops < math.inf, f"--tflops {args.tflops}: must be above 0, and finite")
    require(
        0 <= args.jitter <= _MOST_JITTER, f"--jitter {args.jitter}: must be in 0 .. {_MOST_JITTER}"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(flag: str, text: str, least: int) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{flag} {text}: expected numbers of at least {least}, as in 1,2,4")
    return [int(word) for word in words]


def _run(args: argparse.Namespace) -> None:
    _check(args)
    chunks = _numbers("--chunks", args.chunks, 1)
    measured = costs_of_run(args.run, _ROOT) if args.run else None
    model, lengthened = _model(args, measured)
    num_ranks = args.pp or (measured.num_ranks if measured else 0)
    if not num_ranks:
        raise ConfigError("--pp: how many pipeline ranks?")
    planner = Planner(
        model,
        num_ranks,
        args.microbatches,
        memory_bytes=_bytes(args.memory) if args.memory else None,
        split_backward=args.split_backward and (measured is None or measured.split),
    )
    plans = planner.best(chunks)
    _print_parts(model, "measured" if measured else "from shapes")
    if measured and measured.run:
        print(
            f"  the run took {measured.run.seconds * 1e3:.2f} ms; simulated "
            f"{measured.run.seconds / lengthened * 1e3:.2f} ms: all times are {lengthened:.3f} "
            "times as long as traced"
        )
    _print_plans(planner, plans)
    _print_baselines(planner, plans[0], chunks)


def _model(args: argparse.Namespace, measured: MeasuredCosts | None) -> tuple[ModelCosts, float]:
    """The parts, and by how much they were lengthened to explain the run's time."""
    shapes = _shapes(args, args.jitter if measured is None else 0.0)
    if measured is None:
        if shapes is None:
            raise ConfigError(
                "give a run, or --num-layers --hidden-size --seq-length --vocab-size for a plan "
                "from shapes"
            )
        return shapes, 1.0
    layers = _layers(args, len(measured.tasks))
    model, lengthened = from_run(measured, layers)
    if shapes is None and args.memory:
        raise ConfigError(
            "--memory: a trace does not tell how large weights and optimizer are; give "
            "--num-layers --hidden-size --seq-length --vocab-size, too"
        )
    return model.with_memory_of(shapes) if shapes else model, lengthened


def _layers(args: argparse.Namespace, num_stages: int) -> list[int]:
    if args.layers:
        layers = _numbers("--layers", args.layers, 0)
        if args.num_layers not in (None, sum(layers)):
            raise ConfigError(
                f"--layers {args.layers}: {sum(layers)} layers, but --num-layers {args.num_layers}"
            )
        return layers
    if not args.num_layers:
        raise ConfigError("--num-layers (or --layers): how many layers did that run have?")
    return even_layers(args.num_layers, num_stages, "give --layers")


def _shapes(args: argparse.Namespace, sigma: float = 0.0) -> ModelCosts | None:
    """Costs from the model's shape; None where it is not given. The GPU is an H200."""
    if not (args.num_layers and args.hidden_size and args.seq_length and args.vocab_size):
        return None
    model = ModelShape(
        hidden_size=args.hidden_size,
        seq_length=args.seq_length,
        vocab_size=args.vocab_size,
        num_heads=1,  # their number costs nothing, only their whole width does
        num_groups=1,
        head_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size or 4 * args.hidden_size,
        gated=args.swiglu,
        fused_loss=args.cross_entropy_loss_fusion,
    )
    shape = RunShape(
        model=model,
        layers=(args.num_layers,),
        tensor=args.tensor_parallel,
        sequence_parallel=args.sequence_parallel,
        micro_batch=args.micro_batch_size,
    )
    device = dataclasses.replace(known_gpu("H200"), flops=args.tflops * 1e12)
    return planning_costs(shape, device=device, sigma=sigma)


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*)\s*GiB", text)
    if match is None:
        raise ConfigError(f"--memory {text}: expected a value like 80GiB")
    return float(match[1]) * 2**30


def _print_parts(model: ModelCosts, source: str) -> None:
    print(f"{model.num_layers} layers ({source}); milliseconds of F, B, W for one microbatch:")
    for name, part in (
        ("layer", model.layer),
        ("embedding", model.embedding),
        ("head", model.head),
    ):
        times = " ".join(f"{time * 1e3:8.3f}" for time in part.times)
        print(f"  {name:10s} {times}   = {sum(part.times) / sum(model.layer.times):.2f} layers")
    print(f"  hop {model.hop * 1e3:.3f} ms, spread of task times {model.sigma:.3f}")


def _print_plans(planner: Planner, plans: list[Prediction]) -> None:
    print(
        f"\n{'chunks':>6s} {'cap':>9s} {'ms':>9s} {'busiest':>9s} {'ratio':>6s} {'GiB':>7s}  layout"
    )
    for plan in plans:
        print(
            f"{plan.layout.num_chunks:6d} {plan.cap:>9s} {plan.seconds * 1e3:9.2f} "
            f"{plan.busiest_seconds * 1e3:9.2f} {plan.seconds / plan.busiest_seconds:6.3f} "
            f"{_gib(max(plan.peak_bytes)):>7s}  {plan.layout.text()}"
        )
    best = plans[0]
    print("\nFlags of the first:")
    print(f"  --pipeline-model-parallel-size {planner.num_ranks}")
    print(f"  --pipeline-model-parallel-layout '{best.layout.text()}'")
    print(f"  --use-dpp --dpp-activation-cap {best.cap}")


def _gib(num_bytes: float) -> str:
    """A trace without memory and without shapes beside it says nothing about it."""
    return f"{num_bytes / 2**30:.2f}" if num_bytes else "-"


def _print_baselines(planner: Planner, best: Prediction, chunks: Sequence[int]) -> None:
    """What the plan gains over Megatron's own layout, and why."""
    fused = Planner(
        planner.model, planner.num_ranks, planner.num_microbatches, split_backward=False
    )
    print("\nAgainst the default layout (the same number of layers on every stage):")
    for num_chunks in chunks:
        layout = planner.default_layout(num_chunks)
        if layout is None:
            print(f"  {num_chunks} chunks: the layers do not lie evenly")
            continue
        static = fused.predict(layout, "megatron", policy="megatron")
        ours = planner.predict(layout, "auto")
        print(
            f"  {num_chunks} chunks: static {_versus(static, best)}; dynamic "
            f"{_versus(ours, best)}; "
            f"busiest rank's own work {ours.busiest_seconds * 1e3:.2f} ms"
        )
    print(f"Why: {_reason(planner, best.layout)}")


def _versus(other: Prediction, best: Prediction) -> str:
    share = best.seconds / other.seconds
    return f"{other.seconds * 1e3:.2f} ms (the plan takes {share:.3f} of that)"


def _reason(planner: Planner, layout: LayerLayout) -> str:
    model = planner.model
    head = sum(model.head.times) / sum(model.layer.times)
    embedding = sum(model.embedding.times) / sum(model.layer.times)
    layers = [layout.rank_layers(rank) for rank in range(layout.num_ranks)]
    return (
        f"the head costs as much as {head:.2f} layers and the embedding as {embedding:.2f}, so the "
        f"ranks get {', '.join(map(str, layers))} layers; no schedule can beat its busiest rank"
    )


if __name__ == "__main__":
    exit_with(main)
