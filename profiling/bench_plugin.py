"""Steps of an unmodified Megatron-LM, under its own schedule and through ``megatron-dpp run``.

    python profiling/bench_plugin.py --sources DIR [--json FILE]

DIR holds archives ``NAME.tar.xz`` of Megatron-LM, or folders NAME. Each version runs
on ``--ranks`` ranks, with sequences of one length and of unlike lengths, the schedules in turns.
Every run is a process group of its own; its first steps are not timed. No run begins after
``--seconds``.

    python profiling/bench_plugin.py --sources DIR --layers-of transformer_engine \\
        --arms static:1,static:8,megatron:8,fused:8,dynamic:8 --more "--swiglu"

An arm is a schedule, and with a colon the number of hardware queues
(``CUDA_DEVICE_MAX_CONNECTIONS``). ``--more`` has further flags of the script.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arms
import harness

_DYNAMIC = ["--use-dpp", "--dpp-strict"]
ARMS = {
    "static": [],
    "megatron": [*_DYNAMIC, "--dpp-policy", "megatron"],
    "fused": [*_DYNAMIC, "--no-dpp-split-backward"],
    "dynamic": _DYNAMIC,
}
"""Name of a schedule -> its flags: the host's own, its order with a split backward, the dynamic
one with a fused and with a split backward."""
LAYERS = {
    "local": "--transformer-impl local --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-persist-layer-norm",
    "transformer_engine": "--transformer-impl transformer_engine",
}
"""Whose layers -> their flags."""
ROWS = ("equal", "unlike")
_ENTRY = Path(__file__).with_name("plugin_entry.py")
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")
_RUN_SECONDS = 150.0


def main() -> int:
    """Measure and print the table; 1 if a run failed."""
    args = parse_arguments()
    end = time.monotonic() + args.seconds
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        cells = [(v, row, arm) for v in args.versions for row in args.rows for arm in args.arms]
        for turn in range(args.rounds):
            for cell in cells:
                if time.monotonic() > end or "/".join(cell) in failed:
                    continue
                result = run(args, *cell, Path(folder))
                print(f"turn {turn + 1}: {' '.join(cell)}: {result.get('error') or result['ms']}")
                sys.stdout.flush()
                if "error" in result:
                    failed.append("/".join(cell))
                else:
                    found.setdefault(cell, []).append(result)
    report(args, found)
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = harness.new_parser(
        __doc__, sources=(".wheels", "folder of archives or folders of Megatron-LM"),
        versions=("core_v0.16.1,main-2026-08-22", "names in it, separated by commas"),
        rounds=(2, "turns of all arms"), iterations=(12, "steps of a run"),
        untimed=(5, "first steps, which are not timed"),
        seconds=(330.0, "no run begins later than this"), json=("", "file for the results"),
        hidden=4096, layers=8, heads=32, sequence=(2048, "longest sequence"),
        ranks=(2, "pipeline size"), microbatches=16, chunks=(2, "model chunks per rank"),
        vocabulary=8191, seed=1, rows=(",".join(ROWS), "lengths, separated by commas"),
        arms=("static,dynamic", f"of {', '.join(ARMS)}, separated by commas; NAME:QUEUES"),
        layers_of=("local", f"whose layers: {', '.join(LAYERS)}"),
        more=("", "further flags of the script"),
        median=(600.0, "median of the unlike lengths, which are lognormal with sigma 1"),
    )  # fmt: skip
    args = parser.parse_args()
    args.versions, args.rows, args.arms = (
        given.split(",") for given in (args.versions, args.rows, args.arms)
    )
    known = {"arms": ARMS, "rows": ROWS, "layers-of": LAYERS}
    given = {"arms": args.arms, "rows": args.rows, "layers-of": [args.layers_of]}
    for flag, names in given.items():
        for name in names:
            if name.partition(":")[0] not in known[flag]:
                parser.error(f"--{flag} {name}: expected one of {', '.join(known[flag])}")
    if args.layers % (args.ranks * args.chunks):
        parser.error(
            f"--layers {args.layers}: must be a multiple of --ranks {args.ranks} x --chunks "
            f"{args.chunks}"
        )
    if args.untimed >= args.iterations:
        parser.error(f"--untimed {args.untimed}: must be below --iterations {args.iterations}")
    for version in args.versions:
        if not (Path(args.sources) / version).is_dir() and not _archive(args, version).is_file():
            parser.error(
                f"--sources {args.sources}: neither {version} nor {version}.tar.xz is there"
            )
    return args


def _archive(args: argparse.Namespace, version: str) -> Path:
    return Path(args.sources) / f"{version}.tar.xz"


def unpacked(args: argparse.Namespace, version: str, folder: Path) -> Path:
    """The folder of a version's sources; an archive is unpacked below ``folder``."""
    given = Path(args.sources) / version
    if given.is_dir():
        return given.resolve()
    if not (folder / version).is_dir():
        with tarfile.open(_archive(args, version)) as tar:
            tar.extractall(folder, filter="data")
    return folder / version


def lengths(args: argparse.Namespace) -> list[int]:
    """Unlike lengths of all microbatches of a run; each step has the same ones."""
    rng = random.Random(args.seed)
    drawn = [rng.lognormvariate(0.0, 1.0) * args.median for _ in range(args.microbatches)]
    return [max(16, min(args.sequence, round(length / 16) * 16)) for length in drawn]


def flags(args: argparse.Namespace) -> list[str]:
    """The script's flags."""
    import torch

    layers = args.layers // (args.ranks * args.chunks)
    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --seq-length {args.sequence} "
        f"--num-attention-heads {args.heads} --max-position-embeddings {args.sequence} "
        f"--micro-batch-size 1 --global-batch-size {args.microbatches} --lr 1e-4 "
        f"--seed {args.seed} --train-iters {args.iterations} --log-interval 1 "
        "--eval-iters 1 --eval-interval 1000 "
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocabulary} "
        "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 "
        f"--pipeline-model-parallel-size {args.ranks} --no-gradient-accumulation-fusion "
        f"--no-masked-softmax-fusion {LAYERS[args.layers_of]} {args.more}"
    )
    if args.chunks > 1:
        words += f" --num-layers-per-virtual-pipeline-stage {layers}"
    if torch.cuda.is_available():
        return [*words.split(), "--bf16"]
    return [*words.split(), "--distributed-backend", "gloo", "--use-cpu-initialization"]


def run(args: argparse.Namespace, version: str, row: str, arm: str, folder: Path) -> dict[str, Any]:
    """One training run: times and losses of its timed steps and its peak memory, or an error."""
    root, record = unpacked(args, version, folder), folder / "peak"
    own = (str(root), str(harness.ROOT), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, own))
    drawn = lengths(args) if row == "unlike" else []
    schedule, _, queues = arm.partition(":")
    environment = {
        **os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "BENCH_SCRIPT": str(root / "pretrain_gpt.py"), "BENCH_RECORD": str(record),
        "BENCH_LENGTHS": ",".join(map(str, drawn)),
        **({"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(args.ranks), "-m", "megatron.dpp.run", str(_ENTRY)]
    try:
        done = subprocess.run(
            [*command, *flags(args), *ARMS[schedule]], env=environment, capture_output=True,
            text=True, cwd=folder, timeout=_RUN_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {_RUN_SECONDS:g} s"}
    steps = _STEP.findall(done.stdout)[args.untimed :]
    if done.returncode or not steps:
        told = done.stderr.split("torch.distributed.elastic.multiprocessing.errors")[0]
        return {"error": f"status {done.returncode}\n{done.stdout[-1500:]}\n{told[-4000:]}"}
    peaks = [Path(f"{record}.{rank}").read_text(encoding="utf-8") for rank in range(args.ranks)]
    return {
        "ms": [float(took) for took, _ in steps],
        "losses": [loss for _, loss in steps],
        "peaks": [json.loads(peak) for peak in peaks],
    }


def report(
    args: argparse.Namespace, found: dict[tuple[str, str, str], list[dict[str, Any]]]
) -> None:
    """Print the medians of all steps, the largest peaks of the ranks, and the last loss."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, PP{args.ranks} x {args.chunks}, "
        f"{args.microbatches} microbatches of {args.sequence} tokens, or "
        f"{sum(lengths(args))} tokens in all, {args.iterations - args.untimed} timed steps of "
        f"each run, {device}, torch {torch.__version__}\n"
    )
    medians = {
        cell: statistics.median(ms for result in results for ms in result["ms"])
        for cell, results in found.items()
    }
    rows = []
    for cell, results in found.items():
        of_runs = [statistics.median(result["ms"]) for result in results]
        static = [ms for (*row, arm), ms in medians.items()
                  if row == list(cell[:2]) and arm.startswith("static")]  # fmt: skip
        ratio = medians[cell] / min(static, default=float("nan"))
        peaks = [
            f"{max(peak[kind] for result in results for peak in result['peaks']) / 1e9:.2f}"
            for kind in ("allocated", "reserved")
        ]
        losses = sorted({result["losses"][-1] for result in results})
        rows.append(
            (cell[0], cell[1], cell[2], f"{medians[cell]:.1f}",
             " ".join(f"{ms:.1f}" for ms in of_runs), f"{ratio:.3f}", *peaks,
             " ".join(losses))
        )  # fmt: skip
    harness.print_table(
        "version | lengths | schedule | median ms | of each run | / best static | GB allocated | "
        "reserved | last loss",
        rows,
    )
    facts = {"settings": vars(args), "device": device, "lengths": lengths(args)}
    named = {" ".join(cell): results for cell, results in found.items()}
    harness.write_json(args.json, {**facts, "runs": named})
    arms.print_gains([*gains(found)])


def gains(found: dict[tuple[str, str, str], list[dict[str, Any]]]) -> Iterator[arms.Measured]:
    """The arms for the table of gains: the median of each run, the largest peak, and whether the
    last loss is that of the static schedule. An arm may have a number of queues, as static:8.
    """
    for (version, row, arm), results in found.items():
        name, _, queues = arm.partition(":")
        static = {
            result["losses"][-1]
            for (*other, one), others in found.items()
            if other == [version, row] and one.startswith("static")
            for result in others
        }
        losses = {result["losses"][-1] for result in results}
        yield arms.Measured(
            name,
            f"{version}, {row}",
            queues,
            [statistics.median(result["ms"]) for result in results],
            max(peak["reserved"] for result in results for peak in result["peaks"]),
            str(losses == static),
        )


if __name__ == "__main__":
    raise SystemExit(main())
