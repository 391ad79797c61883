#!/usr/bin/env python
"""Scaling: tokens/s, speed-up, efficiency and memory over numbers of devices and modes.

    python profiling/bench_scaling.py                        # medium and large, 1, 2, 4, ... GPUs
    python profiling/bench_scaling.py --model medium --devices 1,4 --only dp --only tp2
    python profiling/bench_scaling.py --cpu --devices 1,2    # the sample model, on processes

Every row is a run that ``train`` resolves, with artificial data and a fixed global batch: the same
work on more devices. ``tools/benchmark.sh`` is the short way to start it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from bench_memory import import_path  # noqa: E402

from megatron.dpp.errors import ConfigError  # noqa: E402
from megatron.dpp.launch.job import hardware_queues  # noqa: E402
from megatron.dpp.launch.main import Plan, plan  # noqa: E402

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
    """Run all rows, print the tables, write JSON and a picture when asked to."""
    args = _parse(argv)
    rows: list[Row] = []
    print("| model | devices | mode | ms/iteration | tokens/s |", file=sys.stderr)
    for model in args.model:
        for devices in args.devices:
            for mode in args.only or MODES:
                if (devices == 1 and mode != "dp") or devices < MODES[mode][0]:
                    continue
                row = _run(args, model, devices, mode)
                if row is not None:
                    rows.append(row)
                    _note(args, rows)
        _print_table(model, [row for row in rows if row.model == model])
    if args.plot:
        _draw(rows, args.plot)
    return 0 if rows else 1


def _note(args: argparse.Namespace, rows: list[Row]) -> None:
    """Keep what was measured so far: the runs take minutes."""
    row = rows[-1]
    print(
        f"| {row.model} | {row.devices} | {row.mode} | {row.seconds * 1e3:.1f} | "
        f"{row.tokens_per_second:,.0f} |",
        file=sys.stderr,
        flush=True,
    )
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("--model", action="append", metavar="NAME",
                        help="of configs/models; may be repeated "
                        "(default: medium and large, with --cpu sample)")  # fmt: skip
    parser.add_argument(
        "--devices", metavar="N,N", help="numbers of devices, like 1,2,4 (default: up to all)"
    )
    modes = f"one of {', '.join(MODES)}; may be repeated (default: all)"
    parser.add_argument("--only", action="append", choices=MODES, metavar="MODE", help=modes)
    parser.add_argument("--cpu", action="store_true", help="processes in the place of GPUs")
    parser.add_argument("--options", default="", metavar="WORDS", help="further options of train")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens/s over devices")
    args = parser.parse_args(argv)
    args.model = args.model or (["sample"] if args.cpu else ["medium", "large"])
    args.devices = _devices(args)
    return args


def _devices(args: argparse.Namespace) -> list[int]:
    if args.devices:
        return [int(word) for word in args.devices.split(",")]
    from megatron.dpp.plan import find_machine

    most = len(os.sched_getaffinity(0)) if args.cpu else find_machine().num_gpus
    if most == 0:
        sys.exit("error: no GPU was found; --cpu runs on processes")
    return [count for count in (1, 2, 4, 8) if count <= most]


def _run(args: argparse.Namespace, model: str, devices: int, mode: str) -> Row | None:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        words = f"{MODES[mode][1]} --model {model} --max-steps {_STEPS} {args.options}"
        words += f" {'--procs' if args.cpu else '--gpus'} {devices} --eval-iters 0"
        words += "" if args.cpu else f" {_VOCABULARY}"
        try:
            found = plan([*shlex.split(words), "--metrics-file", str(metrics)])
        except ConfigError as error:
            print(f"  left out: {error}", file=sys.stderr)
            return None
        if not _start(found):
            return None
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return _row(model, devices, mode, rows)


def _row(model: str, devices: int, mode: str, rows: list[dict[str, object]]) -> Row:
    steps = [row for row in rows if "tokens/s" in row][_WARM_UP:]
    compared = next(row for row in rows if "estimate" in row)["estimate"]
    assert isinstance(compared, dict)
    seconds = statistics.median(float(str(row["seconds"])) for row in steps)
    tokens = statistics.median(float(str(row["tokens/s"])) for row in steps)
    memory = max(float(str(row["peak memory"])) for row in steps)
    return Row(model, devices, mode, seconds, float(compared["seconds"][0]), tokens, memory)


def _start(found: Plan) -> bool:
    """torchrun with this interpreter; says what went wrong and goes on when a run fails."""
    script = _ROOT / f"pretrain_{found.resolved.arch}.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(found.setting.per_node), str(script), *found.resolved.argv]
    env = {
        **os.environ, "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        or hardware_queues(found.resolved.argv),
    }  # fmt: skip
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        print(f"  failed: {shlex.join(command)}\n{(result.stdout + result.stderr)[-4000:]}",
              file=sys.stderr)  # fmt: skip
    return result.returncode == 0


def _print_table(model: str, rows: list[Row]) -> None:
    base = next((row for row in rows if row.devices == 1), None)
    print(f"\n{model}\n")
    print("| devices | mode | ms/iteration | estimated | tokens/s | speed-up | efficiency | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        gain = row.tokens_per_second / base.tokens_per_second if base else float("nan")
        print(
            f"| {row.devices} | {row.mode} | {row.seconds * 1e3:.1f} | {row.estimated * 1e3:.1f} | "
            f"{row.tokens_per_second:,.0f} | {gain:.2f} | {gain / row.devices:.0%} | "
            f"{row.memory / 2**30:.2f} |"
        )
    sys.stdout.flush()


def _draw(rows: list[Row], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for model in dict.fromkeys(row.model for row in rows):
        base = next((row for row in rows if row.model == model and row.devices == 1), None)
        for mode in dict.fromkeys(row.mode for row in rows if row.model == model):
            line = [row for row in rows if (row.model, row.mode) == (model, mode)]
            line = [base, *line] if base and mode != "dp" else line
            axes.plot(
                [row.devices for row in line],
                [row.tokens_per_second for row in line],
                marker="o",
                label=f"{model}, {mode}",
            )
        if base:
            most = max(row.devices for row in rows)
            ideal = [base.tokens_per_second, base.tokens_per_second * most]
            axes.plot([1, most], ideal, linestyle=":", color="grey")
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s (dotted: in proportion)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
