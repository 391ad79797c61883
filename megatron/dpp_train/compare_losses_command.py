"""``megatron-dpp compare-losses``: train with the static and the dynamic schedule, and compare.

    megatron-dpp compare-losses                        # GPT, fp16 and bf16, 50 iterations
    megatron-dpp compare-losses --model bert --precisions bf16 --iterations 20

For every precision it runs examples/gpt3/train_gpt3_175b_distributed.sh (or the BERT script) twice:
16 layers of 2048, selective recompute, PP2 x TP2 x 4 chunks on four GPUs. Environment variables
change settings as they do for the script (NUM_LAYERS=8 ...). It prints the time per iteration, the
peak memory, the skipped iterations, and whether losses, gradient norms and final parameters are
equal bit by bit. Kernels are deterministic; with --free only the largest differences are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import command, from_source_tree, new_parser
from megatron.dpp.processes import run_child
from megatron.dpp.files.safe_files import open_text_to_write

_SCRIPTS = {
    "gpt": "examples/gpt3/train_gpt3_175b_distributed.sh",
    "bert": "examples/bert/train_bert_340m_distributed.sh",
}


@dataclass(frozen=True)
class _Training:
    """The content of a run's metrics file."""

    iterations: list[dict[str, Any]]
    hashes: dict[str, str]

    def column(self, name: str) -> list[float]:
        return [math.nan if row.get(name) is None else row[name] for row in self.iterations]


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Train a launch script's model with the static and the dynamic schedule, and compare."
    parser = new_parser(prog, text)
    add = parser.add_argument
    add("--model", choices=sorted(_SCRIPTS), default="gpt")
    add("--precisions", nargs="+", default=["fp16", "bf16"], metavar="NAME", help="fp16, bf16")
    add("--iterations", type=int, default=50, metavar="N", help="default 50")
    add("--free", action="store_true", help="kernels may be non-deterministic")
    add("--out", type=Path, default=Path("compare_losses"), metavar="DIR", help="for the logs")
    add("--reuse", action="store_true", help="compare logs that exist already")
    add("--flags", default="", help="further flags of the training script")
    return parser


def _compare_all(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    equal = True
    for precision in arguments.precisions:
        static = _train(arguments, precision, use_dpp=False)
        dynamic = _train(arguments, precision, use_dpp=True)
        equal &= _compare(static, dynamic)
    return 0 if equal or arguments.free else 1


def _commands(arguments: argparse.Namespace, precision: str, *, use_dpp: bool) -> list[list[str]]:
    """The commands of the launch script, with this Python."""
    environment = {
        "GPUS_PER_NODE": "4",
        **os.environ,
        "DRY_RUN": "1",
        "PYTHON": sys.executable,
        "PRECISION": precision,
        "USE_DPP": str(int(use_dpp)),
        "TRAIN_ITERS": str(arguments.iterations),
    }
    script = str(from_source_tree(_SCRIPTS[arguments.model]))
    flags = shlex.split(arguments.flags)
    if not arguments.free:
        flags.append("--deterministic-mode")
    done = subprocess.run(["bash", script, *flags], env=environment, capture_output=True)
    if done.returncode:
        sys.exit(os.fsdecode(done.stderr).strip())
    return [shlex.split(line) for line in os.fsdecode(done.stdout).splitlines()]


def _train(arguments: argparse.Namespace, precision: str, *, use_dpp: bool) -> _Training:
    name = f"{arguments.model}-{precision}-{'dpp' if use_dpp else 'static'}"
    metrics, log = arguments.out / f"{name}.jsonl", arguments.out / f"{name}.log"
    start = time.perf_counter()
    if not (arguments.reuse and metrics.exists()):
        metrics.unlink(missing_ok=True)
        _run(_commands(arguments, precision, use_dpp=use_dpp), metrics, log)
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    result = _Training(
        [row for row in rows if "learning rate" in row],
        next(row["parameters_sha256"] for row in rows if "parameters_sha256" in row),
    )
    _describe(name, result, time.perf_counter() - start)
    return result


def _run(commands: list[list[str]], metrics: Path, log: Path) -> None:
    *before, training = commands
    training += ["--metrics-file", str(metrics.resolve())]
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ,
    }  # fmt: skip
    with open_text_to_write(log) as file:
        for command in [*before, training]:
            code = run_child(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            if code:
                tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
                sys.exit(f"{tail}\n{log.stem}: exit code {code}, see {log}")


def _describe(name: str, result: _Training, seconds: float) -> None:
    losses = [loss for loss in result.column("lm loss") if not math.isnan(loss)]
    step = statistics.median(result.column("seconds")[5:] or result.column("seconds"))
    peak = max(result.column("peak memory")) / 1e9
    print(
        f"{name:18s} {len(result.iterations)} iterations in {seconds:.0f} s, "
        f"{sum(result.column('skipped')):.0f} skipped, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
        f"{step * 1e3:.1f} ms (median), {peak:.2f} GB on the last rank",
        flush=True,
    )


def _compare(static: _Training, dynamic: _Training) -> bool:
    """Print the comparison; True when all is equal."""
    equal = len(static.iterations) == len(dynamic.iterations)
    for name in ("lm loss", "sop loss", "grad norm", "learning rate", "loss scale"):
        ours, theirs = dynamic.column(name), static.column(name)
        pairs = [(x, y) for x, y in zip(ours, theirs, strict=False) if str(x) != str(y)]
        if pairs:
            equal = False
            print(
                f"  {name}: {len(pairs)} of {len(ours)} differ, by up to "
                f"{max(abs(x - y) for x, y in pairs):.3e}"
            )
        elif not all(math.isnan(value) for value in ours):
            print(f"  {name}: equal in all {len(ours)} iterations")
    same = static.hashes == dynamic.hashes
    print(f"  final parameters: {'equal' if same else 'DIFFERENT'}", flush=True)
    return equal and same


main = command("megatron-dpp compare-losses", _parser, _compare_all)
