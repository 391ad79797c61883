"""Steps of an unmodified Megatron-LM, whose schedules take turns within one process group.

    python profiling/bench_turns.py --sources DIR --versions main-2026-08-22 --rows equal,unlike \\
        --layers-of transformer_engine --more "--swiglu"

As bench_plugin.py, but one run per row: its arms train the same model in blocks of ``--block``
steps, of which the first ``--untimed`` are not timed. A run's noise and its start are thus the
same for all arms. Memory is the most within an arm's blocks, after the cache was emptied.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import bench_plugin
import harness

ARMS: dict[str, dict[str, Any] | None] = {
    "static": None,
    "megatron": {"policy": "megatron"},
    "fused": {"split_backward": False},
    "fused-late": {"split_backward": False, "launch_ahead": False},
    "dynamic": {},
    "static-cap": {"activation_cap": "static"},
}
"""Name of a schedule -> settings of the dynamic pipeline; None for the host's own."""
_ENTRY = Path(__file__).with_name("turns_entry.py")


def main() -> int:
    """Measure and print the table; 1 if a run failed."""
    parser = harness.new_parser(
        __doc__, sources=(".wheels", "folder of archives or folders of Megatron-LM"),
        versions=("main-2026-08-22", "one name in it"), json=("", "file for the results"),
        rounds=(3, "turns of all arms"), block=(8, "steps of an arm's turn"),
        untimed=(3, "first steps of a turn, which are not timed"),
        seconds=(180.0, "most seconds of a run"), hidden=4096, layers=8, heads=32,
        sequence=(2048, "longest sequence"), ranks=(2, "pipeline size"), microbatches=16,
        chunks=(2, "model chunks per rank"), vocabulary=8191, seed=1, rows="equal,unlike",
        median=(600.0, "median of the unlike lengths, which are lognormal with sigma 1"),
        arms=("static,megatron,fused,dynamic", f"of {', '.join(ARMS)}"),
        layers_of=("local", f"whose layers: {', '.join(bench_plugin.LAYERS)}"),
        more=("", "further flags of the script"),
    )  # fmt: skip
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    unknown = [name for name in args.arms if name not in ARMS]
    if unknown:
        parser.error(f"--arms {unknown[0]}: expected one of {', '.join(ARMS)}")
    args.iterations = args.block * args.rounds * len(args.arms)
    failed, results = False, {}
    with tempfile.TemporaryDirectory() as folder:
        for row in args.rows.split(","):
            lines = run(args, row, Path(folder))
            failed = failed or not lines
            results[row] = lines
            report(args, row, lines)
            sys.stdout.flush()
    harness.write_json(args.json, {"settings": vars(args), "steps": results})
    return int(failed)


def run(args: Any, row: str, folder: Path) -> list[list[Any]]:
    """One training run; all ranks' lines."""
    root, record = bench_plugin.unpacked(args, args.versions, folder), folder / f"{row}-steps"
    path = os.pathsep.join((str(root), str(harness.ROOT), os.environ.get("PYTHONPATH", "")))
    drawn = bench_plugin.lengths(args) if row == "unlike" else []
    environment = {
        **os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "BENCH_SCRIPT": str(root / "pretrain_gpt.py"), "BENCH_RECORD": str(record),
        "BENCH_LENGTHS": ",".join(map(str, drawn)), "BENCH_BLOCK": str(args.block),
        "BENCH_ARMS": json.dumps([[name, ARMS[name]] for name in args.arms]),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(args.ranks), "-m", "megatron.dpp.run", str(_ENTRY)]
    try:
        done = subprocess.run(
            [*command, *bench_plugin.flags(args)], env=environment, capture_output=True, text=True,
            cwd=folder, timeout=args.seconds,
        )  # fmt: skip
        output, error = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output, error = str(late.stdout or ""), f"no end within {args.seconds:g} s"
    told = [line for line in output.splitlines() if "dynamic pipeline" in line or "graphs" in line]
    print("\n".join(dict.fromkeys(told)), error.split("torch.distributed.elastic")[0][-2500:])
    lines: list[list[Any]] = []
    for rank in range(args.ranks):
        written = Path(f"{record}.{rank}")
        if written.is_file():
            lines += map(json.loads, written.read_text(encoding="utf-8").splitlines())
    return lines


def report(args: Any, row: str, lines: list[list[Any]]) -> None:
    """Print a row's arms: the median of all timed steps, of each turn, and the largest peaks."""
    steps: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, number, seconds, allocated, reserved in lines:
        peaks[name].append((allocated, reserved))
        if number >= args.untimed:
            steps[name].append(1e3 * seconds)
    medians = {name: statistics.median(steps[name]) for name in steps}
    rows, timed = [], args.block - args.untimed
    for name, took in steps.items():
        turns = [statistics.median(took[at : at + timed]) for at in range(0, len(took), timed)]
        most = [f"{max(each) / 1e9:.2f}" for each in zip(*peaks[name], strict=True)]
        ratio = medians[name] / medians.get("static", float("nan"))
        rows.append((row, name, f"{medians[name]:.1f}", f"{min(turns):.1f} to {max(turns):.1f}",
                     f"{ratio:.3f}", *most))  # fmt: skip
    harness.print_table(
        "lengths | schedule | median ms | of each turn | / static | GB allocated | reserved", rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
