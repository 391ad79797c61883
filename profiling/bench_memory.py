#!/usr/bin/env python
"""Compare estimates with measurements: memory of six layouts, time, and pipeline bubbles.

    python profiling/bench_memory.py                # four GPUs, GPT-2 345M
    python profiling/bench_memory.py --tiny         # the same runs on a CPU; memory is not measured

Every layout is a run of pretrain_gpt.py with ``--estimate``, which writes its estimates and
measurements to the metrics file; pipelines are traced for the bubble. Prints a table per quantity.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import harness

from megatron.dpp.errors import exit_with

_TRACED = (5, 8)
_ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_NAMES = ("num_layers", "hidden_size", "heads", "seq_length", "micro_batch_size")
_MEDIUM, _TINY = (
    dict(zip(_NAMES, sizes, strict=True)) for sizes in ((24, 1024, 16, 1024, 8), (8, 64, 4, 64, 2))
)

_TP2 = "--tensor-model-parallel-size 2"
_PP = "--pipeline-model-parallel-size {procs}"
_PP_V2 = f"{_PP} --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "tp1": "",
    "tp2": _TP2,
    "tp2-sp": f"{_TP2} --sequence-parallel",
    "tp2-sp-selective": f"{_TP2} --sequence-parallel --recompute-activations",
    "pp-v1": f"{_PP} --use-dpp --dpp-cuda-graphs off",
    "pp-v2": f"{_PP_V2} --use-dpp --dpp-cuda-graphs off",
}
"""Run by default; ``{procs}`` is all ranks."""
EXTRA = {"pp-v1-graphs": f"{_PP} --use-dpp --dpp-cuda-graphs on", "pp-v1-static": _PP}
"""Run if ``--only`` names them."""


@dataclass(frozen=True)
class Measured:
    """Results of a run: ``rows`` is name to ``[estimate, measurement or None]``."""

    name: str
    rows: dict[str, list[float | None]]
    bubble: tuple[float, float] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the layouts and print the tables."""
    args = _parse(argv)
    results = []
    for name in args.only or LAYOUTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(_run(args, name, {**LAYOUTS, **EXTRA}[name].format(procs=args.procs)))
    harness.write_json(args.json, [vars(each) for each in results])
    print(
        f"{args.num_layers} layers of {args.hidden_size}, sequence {args.seq_length}, micro batch "
        f"{args.micro_batch_size}, {args.microbatches} microbatches, {args.procs} ranks\n"
    )
    _print_tables(results)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.new_parser(
        __doc__,
        procs=(4, "GPUs, or processes with --tiny"),
        tiny=(False, "a small model on the CPU"),
        microbatches=8,
    )
    choices = [*LAYOUTS, *EXTRA]
    names = f"one of {', '.join(choices)}; may be repeated"
    parser.add_argument("--only", action="append", choices=choices, metavar="NAME", help=names)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args = parser.parse_args(argv)
    vars(args).update(_TINY if args.tiny else _MEDIUM)
    return args


def _run(args: argparse.Namespace, name: str, layout: str) -> Measured:
    flags, traced = _flags(args, layout), "pipeline" in layout
    with tempfile.TemporaryDirectory() as folder:
        if traced:
            flags += ["--trace", "--trace-dir", folder]
            flags += ["--trace-iterations", f"{_TRACED[0]}-{_TRACED[1]}"]
        try:
            rows = harness.train("pretrain_gpt.py", args.procs, flags, _ONE_QUEUE)
        except harness.RunFailed as error:
            sys.exit(str(error))
        row = next(row for row in rows if "estimate" in row)
        bubble = (row["bubble"], _traced_bubble(folder)) if traced else None
        return Measured(name, row["estimate"], bubble)


def _flags(args: argparse.Namespace, layout: str) -> list[str]:
    parallel = shlex.split(layout)
    model = 1
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        if flag in parallel:
            model *= int(parallel[parallel.index(flag) + 1])
    batch = args.micro_batch_size * args.microbatches * (args.procs // model)
    text = (
        f"--num-layers {args.num_layers} --hidden-size {args.hidden_size} "
        f"--num-attention-heads {args.heads} --seq-length {args.seq_length} "
        f"--max-position-embeddings {args.seq_length} --transformer-impl local "
        f"--micro-batch-size {args.micro_batch_size} --global-batch-size {batch} "
        "--hidden-dropout 0 --attention-dropout 0 --no-create-attention-mask-in-dataloader "
        "--tokenizer-type NullTokenizer --vocab-size 50303 --padded-vocab-size 50304 --mock-data "
        f"--train-iters {_TRACED[1] + 1} --lr 1e-4 --eval-iters 0 --log-interval 1 --estimate "
        f"{'--device cpu' if args.tiny else '--bf16'}"
    )
    return [*text.split(), *parallel]


def _traced_bubble(folder: str) -> float:
    """Mean idle share of the traced iterations, as the report has it."""
    command = [sys.executable, "-m", "megatron.dpp", "report", "--benchmark_dir", folder, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT)
    if result.returncode:
        sys.exit(f"{shlex.join(command)}\n{result.stderr[-3000:]}")
    return float(json.loads(result.stdout)["totals"]["bubble"])


def _print_tables(results: list[Measured]) -> None:
    memory = []
    for each in results:
        for name, (guess, real) in each.rows.items():
            if name != "seconds" and guess is not None:
                shown = (f"{real / 2**20:.1f}", f"{guess / real - 1:+.1%}") if real else ("-", "-")
                memory.append((each.name, name, f"{guess / 2**20:.1f}", *shown))
    harness.print_table("layout | what | estimated MiB | measured MiB | error", memory)
    print()
    times = [(each.name, *(f"{(s or 0) * 1e3:.1f}" for s in each.rows["seconds"]))
             for each in results]  # fmt: skip
    harness.print_table("layout | estimated ms per iteration | measured", times)
    bubbles = [(each.name, *(f"{b:.1%}" for b in each.bubble)) for each in results if each.bubble]
    if bubbles:
        print()
        harness.print_table("layout | estimated bubble | traced bubble", bubbles)


if __name__ == "__main__":
    exit_with(main)
