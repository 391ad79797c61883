#!/usr/bin/env python
"""Estimated against measured: memory of six layouts, time, and the bubble of the pipelines.

    python profiling/bench_memory.py                # four GPUs, GPT-2 345M
    python profiling/bench_memory.py --only tp2 --only pp-v2
    python profiling/bench_memory.py --tiny         # the same runs on a CPU; memory is not measured

Every layout is a run of pretrain_gpt.py with ``--estimate``, which writes what it estimated and
measured to its metrics file; pipelines are traced for the bubble. Prints a table per quantity and
exits with 1 when the activations of a fullest stage are off by more than 10 %, or a bubble by more
than 3 points.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_MOST_MEMORY_ERROR = 0.10
_MOST_BUBBLE_ERROR = 0.03
_TRACED = (5, 8)

LAYOUTS = {
    "tp1": "",
    "tp2": "--tensor-model-parallel-size 2",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp2-sp-selective": (
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations"
    ),
    "pp-v1": "--pipeline-model-parallel-size {procs} --use-dpp --dpp-cuda-graphs off",
    "pp-v2": (
        "--pipeline-model-parallel-size {procs} --num-virtual-stages-per-pipeline-rank 2 --use-dpp "
        "--dpp-cuda-graphs off"
    ),
}
"""``{procs}`` is all ranks."""
EXTRA = {
    "pp-v1-graphs": "--pipeline-model-parallel-size {procs} --use-dpp --dpp-cuda-graphs on",
    "tp1-selective": "--recompute-activations",
    "tp1-full": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "pp-v1-static": "--pipeline-model-parallel-size {procs}",
    "pp-v2-static": (
        "--pipeline-model-parallel-size {procs} --num-virtual-stages-per-pipeline-rank 2"
    ),
    "zero1": "--use-distributed-optimizer",
    "zero2": "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
    "zero3": "--use-torch-fsdp2",
}


@dataclass(frozen=True)
class Measured:
    """What a run wrote: ``rows`` is name to ``[estimate, measurement or None]``."""

    name: str
    rows: dict[str, list[float | None]]
    bubble: tuple[float, float] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and tell by the exit code whether the estimates held."""
    args = _parse(argv)
    names = args.only or list(LAYOUTS)
    results = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        layout = {**LAYOUTS, **EXTRA}[name].format(procs=args.procs)
        results.append(_run(args, name, layout))
    if args.json:
        Path(args.json).write_text(json.dumps([vars(each) for each in results], indent=1) + "\n")
    print(f"{_heading(args)}\n")
    wrong = _print_memory(results) + _print_times(results) + _print_bubbles(results)
    for line in wrong:
        print(f"off: {line}")
    return 1 if wrong else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    choices = [*LAYOUTS, *EXTRA]
    parser.add_argument("--only", action="append", choices=choices, metavar="NAME",
                        help=f"one of {', '.join(choices)}; may be repeated")  # fmt: skip
    parser.add_argument("--procs", type=int, default=4, help="GPUs, or processes with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args = parser.parse_args(argv)
    if args.tiny:
        args.num_layers, args.hidden_size, args.heads = 8, 64, 4
        args.seq_length, args.micro_batch_size = 64, 2
    return args


def _run(args: argparse.Namespace, name: str, layout: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        flags = [*_flags(args, layout), "--metrics-file", str(metrics)]
        traced = "pipeline" in layout
        if traced:
            flags += ["--trace", "--trace-dir", folder]
            flags += ["--trace-iterations", f"{_TRACED[0]}-{_TRACED[1]}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(args.procs), str(_ROOT / "pretrain_gpt.py")]
        _start([*launcher, *flags])
        row = next(
            row for row in map(json.loads, metrics.read_text().splitlines()) if "estimate" in row
        )
        bubble = (row["bubble"], _traced_bubble(Path(folder))) if traced else None
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


def import_path() -> str:
    """This repository before whatever the caller's Python finds its packages in."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _start(command: list[str]) -> None:
    environment = {
        **os.environ, "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    if "--use-torch-fsdp2" not in command:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{shlex.join(command)}\n{(result.stdout + result.stderr)[-6000:]}")


def _traced_bubble(folder: Path) -> float:
    """Mean idle share of the traced iterations, as the report has it."""
    run = next(path for path in folder.iterdir() if path.is_dir())
    command = [sys.executable, str(_ROOT / "profiling" / "report.py")]
    command += ["--benchmark_dir", str(run), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if result.returncode:
        sys.exit(f"{shlex.join(command)}\n{result.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(result.stdout)
    return float(report["totals"]["bubble"])


def _heading(args: argparse.Namespace) -> str:
    return (
        f"{args.num_layers} layers of {args.hidden_size}, sequence {args.seq_length}, micro batch "
        f"{args.micro_batch_size}, {args.microbatches} microbatches, {args.procs} ranks"
    )


def _print_memory(results: list[Measured]) -> list[str]:
    """The two memory columns by stage; lines about activations that are off."""
    wrong = []
    print("| layout | what | estimated MiB | measured MiB | error |")
    print("|---|---|---|---|---|")
    for result in results:
        for name, (guess, real) in result.rows.items():
            if name == "seconds" or guess is None:
                continue
            error = guess / real - 1 if real else None
            shown = ("-", "-") if real is None else (f"{real / 2**20:.1f}", f"{error:+.1%}")
            print(f"| {result.name} | {name} | {guess / 2**20:.1f} | {shown[0]} | {shown[1]} |")
        wrong += _worst_stage(result)
    return wrong


def _worst_stage(result: Measured) -> list[str]:
    """What decides whether a model fits is the stage with the highest peak."""
    pairs = [pair for name, pair in result.rows.items() if name.endswith("activations")]
    if any(real is None for _, real in pairs):
        return []
    guess, real = (max(pair[i] or 0.0 for pair in pairs) for i in (0, 1))
    if abs(guess / real - 1) <= _MOST_MEMORY_ERROR:
        return []
    return [f"{result.name}: activations of the fullest stage by {guess / real - 1:+.1%}"]


def _print_times(results: list[Measured]) -> list[str]:
    print("\n| layout | estimated ms per iteration | measured |")
    print("|---|---|---|")
    for result in results:
        guess, real = result.rows["seconds"]
        print(f"| {result.name} | {(guess or 0) * 1e3:.1f} | {(real or 0) * 1e3:.1f} |")
    return []


def _print_bubbles(results: list[Measured]) -> list[str]:
    pipelines = [(each.name, *each.bubble) for each in results if each.bubble]
    if not pipelines:
        return []
    print("\n| layout | estimated bubble | traced bubble |")
    print("|---|---|---|")
    wrong = []
    for name, guess, real in pipelines:
        print(f"| {name} | {guess:.1%} | {real:.1%} |")
        if abs(guess - real) > _MOST_BUBBLE_ERROR:
            wrong.append(f"{name}: bubble by {(guess - real) * 100:+.1f} points")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
