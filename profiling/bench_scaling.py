#!/usr/bin/env python
"""Measure scaling: tokens/s, speed-up, efficiency and memory over devices and modes.

    python profiling/bench_scaling.py                        # medium and large, 1, 2, 4, ... GPUs
    python profiling/bench_scaling.py --model medium --devices 1,4 --only dp --only tp2
    python profiling/bench_scaling.py --cpu --devices 1,2    # the sample model, on processes

Every row is a run that ``train`` resolves, with artificial data and a fixed global batch: the same
work on more devices. ``tools/benchmark.sh`` is the short way to start it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import harness

from megatron.dpp.errors import ConfigError, exit_with
from megatron.dpp_train.launch.job import whole_variable
from megatron.dpp_train.launch.main import plan

MODES = {
    "dp": (1, "--mode simple"),
    "tp2": (2, "--mode 3d --tp 2"),
    "tp4": (4, "--mode 3d --tp 4"),
    "pp2": (2, "--mode 3d --pp 2"),
    "pp4": (4, "--mode 3d --pp 4"),
    "tp2-pp2": (4, "--mode 3d --tp 2 --pp 2"),
    "zero1": (2, "--mode zero --zero-stage 1"),
    "zero2": (2, "--mode zero --zero-stage 2"),
    "zero3": (2, "--mode zero --zero-stage 3"),
}
"""Name to the fewest devices that it makes sense with, and its options."""
_STEPS = 18
_WARM_UP = 9
"""Graphs are captured in iterations 3 and 4, and where a pipeline's order varies in some more."""
_VOCABULARY = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50303"


@dataclass(frozen=True)
class Row:
    """A run. ``seconds`` is the median of its iterations after the warm-up; ``estimated`` its
    estimate; ``memory`` the peak of the last rank in bytes."""

    model: str
    devices: int
    mode: str
    seconds: float
    estimated: float
    tokens_per_second: float
    memory: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rows, print the tables, and write JSON when asked to."""
    args = parse(argv)
    rows: list[Row] = []
    for model in args.model:
        for devices in args.devices:
            for mode in args.only or MODES:
                if (devices == 1 and mode != "dp") or devices < MODES[mode][0]:
                    continue
                print(f"{model}, {devices} devices, {mode} ...", file=sys.stderr, flush=True)
                row = _run(args, model, devices, mode)
                if row is not None:
                    rows.append(row)
                    print(f"  {row.seconds * 1e3:.1f} ms, {row.tokens_per_second:,.0f} tokens/s",
                          file=sys.stderr)  # fmt: skip
                    harness.write_json(args.json, [asdict(row) for row in rows])
        _print_table(model, [row for row in rows if row.model == model])
    return 0 if rows else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the numbers of devices."""
    parser = harness.new_parser(
        __doc__, cpu=(False, "processes in the place of GPUs"), options=("", "more words of train")
    )
    add = parser.add_argument
    models = "of configs/models; may be repeated (None: medium and large, with --cpu sample)"
    add("--model", action="append", metavar="NAME", help=models)
    add("--devices", metavar="N,N", help="numbers of devices, like 1,2,4 (None: up to all)")
    modes = f"one of {', '.join(MODES)}; may be repeated (None: all)"
    add("--only", action="append", choices=MODES, metavar="MODE", help=modes)
    add("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args(argv)
    args.model = args.model or (["sample"] if args.cpu else ["medium", "large"])
    args.devices = _devices(args)
    return args


def _devices(args: argparse.Namespace) -> list[int]:
    if args.devices:
        return [int(word) for word in args.devices.split(",")]
    from megatron.dpp_train.cost.device import find_machine

    most = len(os.sched_getaffinity(0)) if args.cpu else find_machine().num_gpus
    if os.environ.get("NUM_GPUS"):
        most = whole_variable("NUM_GPUS", os.environ)
    if most == 0:
        raise ConfigError("no GPU was found; --cpu runs on processes")
    return sorted({count for count in (1, 2, 4, 8, most) if count <= most})


def _run(args: argparse.Namespace, model: str, devices: int, mode: str) -> Row | None:
    words = f"{MODES[mode][1]} --model {model} --max-steps {_STEPS} {args.options}"
    words += f" {'--procs' if args.cpu else '--gpus'} {devices} --eval-iters 0"
    words += "" if args.cpu else f" {_VOCABULARY}"
    try:
        found = plan(shlex.split(words))
        if found.preparation:
            subprocess.run([sys.executable, *found.preparation], check=True, capture_output=True)
        rows = harness.train_planned(found)
    except (ConfigError, harness.RunFailed) as error:
        what = "left out" if isinstance(error, ConfigError) else "failed"
        print(f"  {what}: {error}", file=sys.stderr)
        return None
    return _row(model, devices, mode, rows)


def _row(model: str, devices: int, mode: str, rows: list[dict[str, Any]]) -> Row:
    steps = [row for row in rows if "tokens/s" in row][_WARM_UP:]
    estimate = next(row["estimate"] for row in rows if "estimate" in row)
    return Row(
        model,
        devices,
        mode,
        seconds=statistics.median(float(row["seconds"]) for row in steps),
        estimated=float(estimate["seconds"][0]),
        tokens_per_second=statistics.median(float(row["tokens/s"]) for row in steps),
        memory=max(float(row["peak memory"]) for row in steps),
    )


def _print_table(model: str, rows: list[Row]) -> None:
    base = next((row.tokens_per_second for row in rows if row.devices == 1), float("nan"))
    print(f"\n{model}\n")
    harness.print_table(
        "devices | mode | ms/iteration | estimated | tokens/s | speed-up | efficiency | GiB",
        (
            (row.devices, row.mode, f"{row.seconds * 1e3:.1f}", f"{row.estimated * 1e3:.1f}",
             f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_second / base:.2f}",
             f"{row.tokens_per_second / base / row.devices:.0%}", f"{row.memory / 2**30:.2f}")
            for row in rows
        ),
    )  # fmt: skip


if __name__ == "__main__":
    exit_with(main)
