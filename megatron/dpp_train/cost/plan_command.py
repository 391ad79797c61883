"""``megatron-dpp plan``: choose layers per pipeline stage, chunks per rank and the memory cap.

    megatron-dpp plan benchmark/data-1-pipeline-4-tensor-1-dpp --num-layers 16 --microbatches 8
    megatron-dpp plan costs.json --layers 2,2,2,2,2,2,2,2 --microbatches 32 --memory 80GiB
    megatron-dpp plan --pp 4 --num-layers 16 --hidden-size 4096 --seq-length 2048 --vocab-size 50304

Plans from a traced run, from a cost file (``megatron-dpp report --costs``), or from the model's
shapes. Prints Megatron's flags of the best plan, its predicted gain, and the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from megatron.dpp.command_line import ROOT, command, new_parser
from megatron.dpp.errors import ConfigError, require_value
from megatron.dpp.naming import flag_name
from megatron.dpp.schedule import BUILT_IN, chosen_policy
from megatron.dpp.sim.measured import MeasuredCosts
from megatron.dpp_train.cost.device import Device, known_gpu
from megatron.dpp_train.cost.model_costs import ModelCosts
from megatron.dpp_train.cost.planner import Planner, Prediction, best_of, from_run
from megatron.dpp_train.cost.run_costs import costs_of_run, even_layers
from megatron.dpp_train.cost.shape import LayerLayout, ModelShape, RunSchedule, RunShape
from megatron.dpp_train.cost.times import planning_costs

_MOST_JITTER = 5.0
"""Largest sigma, as in the simulator: with more, factors leave the range of floating point."""
_COUNTS = {
    "num_layers": "transformer layers of the model",
    "pp": "pipeline ranks (default: the run's)",
    "microbatches": "microbatches of an iteration (default 8)",
    "hidden_size": "", "ffn_hidden_size": "", "seq_length": "", "vocab_size": "",
    "micro_batch_size": "default 1", "tensor_parallel": "default 1",
}  # fmt: skip
"""Options that are whole numbers of at least 1, and their help."""


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Plan the layers of each pipeline stage, the chunks per rank and the memory cap."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="directory of a traced run, or a cost file")
    add("--layers", metavar="N,N", help="layers of the run's stages, as 2,2,2,1 (default: equal)")
    add("--chunks", default="1,2,4", metavar="N,N", help="chunks to try (default 1,2,4)")
    add("--memory", metavar="80GiB", help="memory of a rank for weights, optimizer and activations")
    add("--policy", choices=tuple(BUILT_IN), default="auto", help="of the schedule")
    text = "tokens of the slices of a sequence, or auto (with the model's shapes)"
    add("--slices", metavar="N|auto", help=text)
    add("--split-backward", action=argparse.BooleanOptionalAction, default=True)
    shapes = parser.add_argument_group("shapes of the model (with a run: for its memory)")
    for name, text in _COUNTS.items():
        group = parser if list(_COUNTS).index(name) < 3 else shapes
        group.add_argument(flag_name(name), type=int, metavar="N", help=text)
    parser.set_defaults(microbatches=8, micro_batch_size=1, tensor_parallel=1)
    shapes.add_argument("--swiglu", action="store_true")
    shapes.add_argument("--sequence-parallel", action="store_true", help="with --tensor-parallel")
    shapes.add_argument("--cross-entropy-loss-fusion", action="store_true")
    tflops = "GEMM rate of a GPU (default 710)"
    shapes.add_argument("--tflops", type=float, default=710.0, metavar="T", help=tflops)
    spread = "spread of task times to assume"
    shapes.add_argument("--jitter", type=float, default=0.0, metavar="X", help=spread)
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse impossible numbers by their flags."""
    for name in _COUNTS:
        value = getattr(args, name)
        require_value(args, name, value is None or value >= 1, "at least 1")
    require_value(args, "tflops", 0 < args.tflops < math.inf, "above 0, and finite")
    require_value(args, "jitter", 0 <= args.jitter <= _MOST_JITTER, f"in 0 .. {_MOST_JITTER}")


def _numbers(flag: str, text: str, least: int) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{flag} {text}: expected numbers of at least {least}, as in 1,2,4")
    return [int(word) for word in words]


def _run(args: argparse.Namespace) -> int:
    _check(args)
    chunks = _numbers("--chunks", args.chunks, 1)
    measured = costs_of_run(args.run, ROOT) if args.run else None
    model, lengthened = _model(args, measured)
    num_ranks = args.pp or (measured.num_ranks if measured else 0)
    if not num_ranks:
        raise ConfigError("--pp is required without a run: the number of pipeline ranks")
    planners, cuts = dict[int, Planner](), dict[int, int]()
    made: dict[int, Planner] = {}
    for number in chunks:
        units, cuts[number] = _units(args, num_ranks, number) if args.slices else ([], 0)
        if len(units) not in made:
            made[len(units)] = Planner(
                _in_slices(args, model, units) if units else model,
                num_ranks,
                args.microbatches,
                memory_bytes=_bytes(args.memory) if args.memory else None,
                split_backward=args.split_backward and (measured is None or measured.split),
                policy=args.policy,
            )
        planners[number] = made[len(units)]
    plans = best_of(planners)
    best = plans[0].layout.num_chunks
    model = planners[best].model
    _print_parts(model, "measured" if measured else "from shapes")
    if measured and measured.run:
        print(
            f"  the run took {measured.run.seconds * 1e3:.2f} ms; simulated "
            f"{measured.run.seconds / lengthened * 1e3:.2f} ms: all times are {lengthened:.3f} "
            "times as long as traced"
        )
    _print_plans(planners[best], plans, cuts[best])
    _print_baselines(planners, plans[0])
    return 0


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
        raise ConfigError(
            "--num-layers (or --layers) is required with a run: the layers that it had"
        )
    return even_layers(args.num_layers, num_stages, "give --layers")


def _units(args: argparse.Namespace, num_ranks: int, num_chunks: int) -> tuple[list[RunShape], int]:
    """The slices of a microbatch on so many chunks per rank, as training cuts it, and their tokens;
    none where it does not.

    Raises:
        ConfigError: no such slices, or the model's shapes are not given.
    """
    shape = _shape(args)
    if shape is None:
        raise ConfigError(
            f"--slices {args.slices}: a run's trace does not tell what slices take; give "
            "--num-layers --hidden-size --seq-length --vocab-size, too"
        )
    if not re.fullmatch("auto|[1-9][0-9]{0,9}", args.slices):
        raise ConfigError(f"--slices {args.slices}: expected a number of tokens, or auto")
    schedule = RunSchedule(
        dynamic=True, policy=args.policy, cap="auto", split_backward=args.split_backward,
        slice_tokens=args.slices, head_in_forward=True,
    )  # fmt: skip
    run = dataclasses.replace(
        shape, pipeline=num_ranks, layers=(1,) * num_ranks * num_chunks,
        num_microbatches=args.microbatches, schedule=schedule,
    )  # fmt: skip
    cut = run.num_slices > 1
    where = f"in {run.num_slices} slices" if cut else "whole"
    with_chunks = f" with {num_chunks} chunks" if args.slices == "auto" else ""
    print(f"sequences of {args.seq_length} tokens run {where}{with_chunks}")
    if not cut:
        return [], 0
    return run.slices, run.weighed.tokens if args.slices == "auto" else int(args.slices)


def _in_slices(
    args: argparse.Namespace, model: ModelCosts, units: Sequence[RunShape]
) -> ModelCosts:
    """The costs of microbatches that run in these slices."""
    shape = _shape(args)
    assert shape is not None
    costs = [planning_costs(shape, units=each, device=_device(args)) for each in ((), units)]
    return model.in_slices(*costs)


def _device(args: argparse.Namespace) -> Device:
    return known_gpu("H200").with_figures(args.tflops, None)


def _shapes(args: argparse.Namespace, sigma: float = 0.0) -> ModelCosts | None:
    """Costs from the model's shape; None where it is not given. The GPU is an H200."""
    shape = _shape(args)
    return None if shape is None else planning_costs(shape, device=_device(args), sigma=sigma)


def _shape(args: argparse.Namespace) -> RunShape | None:
    """The model's shape; None where it is not given."""
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
    return RunShape(
        model=model,
        layers=(args.num_layers,),
        tensor=args.tensor_parallel,
        sequence_parallel=args.sequence_parallel,
        micro_batch=args.micro_batch_size,
    )


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*)\s*GiB", text)
    if match is None:
        raise ConfigError(f"--memory {text}: expected a value like 80GiB")
    return float(match[1]) * 2**30


def _print_parts(model: ModelCosts, source: str) -> None:
    unit = "one microbatch" if model.slices is None else "a mean slice"
    print(f"{model.num_layers} layers ({source}); milliseconds of F, B, W for {unit}:")
    for name, part in (
        ("layer", model.layer),
        ("embedding", model.embedding),
        ("head", model.head),
    ):
        times = " ".join(f"{time * 1e3:8.3f}" for time in part.times)
        print(f"  {name:10s} {times}   = {sum(part.times) / sum(model.layer.times):.2f} layers")
    print(f"  hop {model.hop * 1e3:.3f} ms, spread of task times {model.sigma:.3f}")


def _print_plans(planner: Planner, plans: list[Prediction], slices: int) -> None:
    print(
        f"\n{'chunks':>6s} {'cap':>9s} {'ms':>9s} {'busiest':>9s} {'ratio':>6s} {'GiB':>7s}  layout"
    )
    for plan in plans:
        peak = max(plan.peak_bytes)  # 0 of a trace without memory, and without shapes beside it
        print(
            f"{plan.layout.num_chunks:6d} {plan.cap:>9s} {plan.seconds * 1e3:9.2f} "
            f"{plan.busiest_seconds * 1e3:9.2f} {plan.seconds / plan.busiest_seconds:6.3f} "
            f"{f'{peak / 2**30:.2f}' if peak else '-':>7s}  {plan.layout.text()}"
        )
    best = plans[0]
    print("\nFlags of the first:")
    print(f"  --pipeline-model-parallel-size {planner.num_ranks}")
    print(f"  --pipeline-model-parallel-layout '{best.layout.text()}'")
    chosen = "" if planner.policy == "auto" else f" --dpp-policy {planner.policy}"
    chosen += f" --dpp-slice-tokens {slices}" if slices else ""
    print(f"  --use-dpp --dpp-activation-cap {best.cap}{chosen}")


def _print_baselines(planners: Mapping[int, Planner], best: Prediction) -> None:
    """Print the gain over Megatron's own layout, and its reason."""
    print("\nAgainst the default layout (the same number of layers on every stage):")
    for num_chunks, planner in planners.items():
        layout = planner.default_layout(num_chunks)
        if layout is None:
            print(f"  {num_chunks} chunks: the layers cannot be divided by the stages")
            continue
        fused = Planner(
            planner.model, planner.num_ranks, planner.num_microbatches, split_backward=False
        )
        policy = chosen_policy(planner.policy, planner.num_ranks)
        static = fused.predict(layout, "megatron", policy="megatron")
        ours = planner.predict(layout, "auto")
        print(
            f"  {num_chunks} chunks: static {_versus(static, best)}; dynamic "
            f"pipeline, policy {policy}, {_versus(ours, best)}; "
            f"busiest rank's own work {ours.busiest_seconds * 1e3:.2f} ms"
        )
    print(f"Why: {_reason(planners[best.layout.num_chunks], best.layout)}")


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


main = command("megatron-dpp plan", _parser, _run)
