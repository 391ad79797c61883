#!/usr/bin/env python
"""Training steps of a known model, cut to the layers that fit: time, tokens/s and share of peak.

    python profiling/bench_models.py                                # Llama 3 8B, 8 layers, one GPU
    python profiling/bench_models.py --layers 16 --devices 2        # PP2: static and dynamic
    python profiling/bench_models.py --cpu --model tiny-llama3 --layers 4 --devices 2

Each row is a run that ``train`` resolves, with artificial data and the model's own vocabulary. The
rows take turns, ``--rounds`` times. FLOPs are counted as Megatron-LM logs them, without recompute.
"""

from __future__ import annotations

import importlib.util
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import harness

from megatron.dpp.errors import ConfigError, exit_with
from megatron.dpp_train.cost.flops import flops_per_iteration
from megatron.dpp_train.launch.checked import checked
from megatron.dpp_train.launch.flags import model_flags
from megatron.dpp_train.launch.main import Plan, plan

_WARM_UP = 8
"""Iterations that are not counted: graphs are captured in iterations 3 and 4."""
_BF16_PEAK = 989.4
"""TFLOP/s of an H100 or H200 SXM in dense bf16 products, by NVIDIA's data sheet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rows in turns and print the table."""
    parser = harness.new_parser(
        __doc__,
        model=("llama3-8b", "a file of configs/models, or a Hugging Face model's folder"),
        layers=(8, "layers of the cut model"),
        devices=(1, "GPUs, or processes with --cpu; several are pipeline ranks"),
        sequence=(0, "tokens of a sample (0: the model's)"),
        microbatches=(16, "microbatches of an iteration"),
        micro_batch=(1, "samples of a microbatch"),
        steps=(16, "iterations of a run"),
        rounds=(2, "times that the rows take turns"),
        peak=(_BF16_PEAK, "peak of a GPU in TFLOP/s"),
        cpu=(False, "processes in the place of GPUs; no share of peak"),
        options=("", "more words of train"),
    )
    args = parser.parse_args(argv)
    if args.steps <= _WARM_UP:
        parser.error(f"--steps {args.steps}: must be above the {_WARM_UP} that are not counted")
    plans: dict[str, Plan] = {}
    for name, words in _rows(args).items():
        try:
            plans[name] = plan(shlex.split(words))
        except ConfigError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    memory: dict[str, float] = {}
    for turn in range(args.rounds):
        for name, found in list(plans.items()):
            print(f"round {turn + 1}, {name} ...", file=sys.stderr, flush=True)
            try:
                rows = harness.train_planned(found)
            except harness.RunFailed as error:
                print(f"  failed: {error}", file=sys.stderr)
                del plans[name]
                continue
            steps = [row for row in rows if "tokens/s" in row][_WARM_UP:]
            seconds[name] += [float(row["seconds"]) for row in steps]
            memory[name] = max(float(row["peak memory"]) for row in steps)
    _print_table(args, plans, seconds, memory)
    return 0 if plans else 1


def _rows(args: Any) -> dict[str, str]:
    """Name -> the words of train."""
    tokens = model_flags(args.model).get("--padded-vocab-size", 50304)
    batch = args.microbatches * args.micro_batch
    common = (
        f"--model {args.model} --num-layers {args.layers} --micro-batch-size {args.micro_batch} "
        f"--global-batch-size {batch} --max-steps {args.steps} --eval-iters 0 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {tokens - 1} --padded-vocab-size {tokens} "
        f"{'--procs' if args.cpu else '--gpus'} {args.devices} {args.options}"
    )
    if args.sequence:
        common += f" --seq-length {args.sequence}"
    if args.devices == 1:
        rows = {"one device": f"--mode simple {common}"}
    else:
        pipeline = f"--mode 3d --pp {args.devices} {common}"
        rows = {"static": f"{pipeline} --no-dpp", "dynamic": pipeline}
    if not args.cpu and importlib.util.find_spec("transformer_engine"):
        engine = " --transformer-impl transformer_engine"
        rows |= {f"{name}, Transformer Engine": words + engine for name, words in rows.items()}
    return rows


def _print_table(
    args: Any, plans: dict[str, Plan], seconds: dict[str, list[float]], memory: dict[str, float]
) -> None:
    lines = []
    for name, found in plans.items():
        run = checked(found.resolved, found.devices)
        each = statistics.median(seconds[name])
        spread = harness.quantile(seconds[name], 0.9) / each - 1
        rate = flops_per_iteration(run, run.global_batch_size) / each / args.devices / 1e12
        tokens = run.global_batch_size * run.seq_length / each
        share = "-" if args.cpu else f"{rate / args.peak:.1%}"
        lines.append(
            (name, run.num_layers, run.seq_length, run.global_batch_size, f"{each * 1e3:.1f}",
             f"{spread:.1%}", f"{tokens:,.0f}", f"{rate:.2f}", share,
             f"{memory[name] / 2**30:.2f}")
        )  # fmt: skip
    print(f"\n{args.model}, {args.devices} {'processes' if args.cpu else 'GPUs'}, medians\n")
    harness.print_table(
        "run | layers | sequence | samples | ms/iteration | to the 90 % quantile | tokens/s | "
        "TFLOP/s per device | share of peak | GiB",
        lines,
    )


if __name__ == "__main__":
    exit_with(main)
