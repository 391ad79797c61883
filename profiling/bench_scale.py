#!/usr/bin/env python3
"""All benchmarks of four or eight GPUs, one after the other.

    python profiling/bench_scale.py --devices 4 --sources DIR
    python profiling/bench_scale.py --devices 8 --only experts,equal --dry-run

DIR holds archives of Megatron-LM, as for bench_plugin.py. Each benchmark writes its table and its
results into ``--out``; one that fails does not keep the others from running. Without GPUs,
``lengths`` runs on stages that sleep, and the others are refused or fail. ``--predict`` prints what
the simulator expects of ``lengths`` instead, for comparison.
"""

from __future__ import annotations

import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import harness
from lengths_plans import LENGTHS, PLANS, Plans, longest_of

from megatron.dpp.errors import exit_with
from megatron.dpp.sim.lengths import LengthCosts

_HIDDEN_2048 = "--hidden 2048 --heads 16"
_MIXTRAL = "--hidden 4096 --expert-hidden 14336 --experts 8 --layers 8"
_QWEN3 = "--hidden 2048 --heads 32 --expert-hidden 768 --experts 128 --topk 8 --layers 16"
_SCHEDULES = "--schedules static2,eagersplit2 --grouped-gemm --verify"
GROUPS = {
    "lengths": {
        "sft": "lengths --ranks {n} --chunks 2 --lengths sft",
        "long": "lengths --ranks {n} --chunks 2 --lengths long",
    },
    "plugin": {
        "megatron-lm": "plugin --ranks {n} --layers 16 --sources {sources} "
        "--versions main-2026-08-22 --seconds 500",
    },
    "experts": {
        "mixtral": f"schedule --ranks 2 --expert-parallel {{half}} {_MIXTRAL} {_SCHEDULES}",
        "mixtral-deep": f"schedule --ranks {{half}} --expert-parallel 2 {_MIXTRAL} {_SCHEDULES}",
        "qwen3": f"schedule --ranks 2 --expert-parallel {{half}} {_QWEN3} {_SCHEDULES}",
        "qwen3-deep": f"schedule --ranks {{half}} --expert-parallel 2 {_QWEN3} {_SCHEDULES}",
    },
    "equal": {
        "hidden-4096": "schedule --ranks {n} --layers {layers} --microbatches {twice} "
        "--schedules static2,eagersplit2,static4,eagersplit4",
        "hidden-2048": f"schedule --ranks {{n}} {_HIDDEN_2048} --layers {{layers}} "
        "--microbatches {twice} --schedules static2,graphstatic2,split2,split4",
        "vocabulary": f"schedule --ranks {{n}} {_HIDDEN_2048} --microbatches {{twice}} "
        "--vocabulary 128256 --layers {vocabulary_layers} --layout {layout} "
        "--schedules static2,split2,laidsplit2",
        "tensor": "schedule --ranks {half} --tensor 2 --microbatches {twice} "
        "--schedules static2,split2",
    },
}
"""Group -> name of a benchmark -> its words; ``half`` and ``twice`` are of the devices."""


def main() -> int:
    """Run the chosen groups; 1 if a benchmark failed."""
    parser = harness.new_parser(
        __doc__,
        devices=(4, "4 or 8"),
        only=(",".join(GROUPS), "groups, separated by commas"),
        sources=(".wheels", "folder of archives of Megatron-LM"),
        out=("scale", "folder for tables and results"),
        dry_run=(False, "only print the commands"),
        predict=(False, "only print the simulator's expectation of lengths"),
    )
    args = parser.parse_args()
    groups = args.only.split(",")
    if args.devices not in (4, 8):
        parser.error(f"--devices {args.devices}: expected 4 or 8")
    for group in groups:
        if group not in GROUPS:
            parser.error(f"--only {group}: expected one of {', '.join(GROUPS)}")
    if args.predict:
        predict(args.devices)
        return 0
    failed = []
    for group in groups:
        for name, words in commands(group, args.devices, args.sources).items():
            print(f"== {group} {name}: megatron-dpp bench {shlex.join(words)}", flush=True)
            if not args.dry_run and not _run(words, Path(args.out), f"{group}-{name}"):
                failed.append(f"{group} {name}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def commands(group: str, devices: int, sources: str) -> dict[str, list[str]]:
    """Name -> words after ``megatron-dpp bench`` of a group's benchmarks."""
    layers = 2 * devices  # as many everywhere without a layout
    values = {
        "n": devices, "half": devices // 2, "twice": 2 * devices, "sources": sources,
        "layers": 4 * devices, "vocabulary_layers": layers, "layout": layout(devices, layers),
    }  # fmt: skip
    return {name: shlex.split(words.format(**values)) for name, words in GROUPS[group].items()}


def predict(num_ranks: int, *, hidden: int = 4096, batches: int = 8) -> None:
    """Print the simulated time of each plan over that of the static schedule as drawn."""
    rows = []
    for mix in LENGTHS:
        rng, found = random.Random(0), dict[tuple[str, str], list[float]]()
        for _ in range(batches):
            plans = Plans(
                mix, rng, rows=8 * num_ranks, ranks=num_ranks, chunks=2, longest=longest_of(mix),
                costs=LengthCosts.transformer(hidden),
            )  # fmt: skip
            drawn = plans.seconds("static", plans.planned("static", "drawn")[1])
            for schedule in ("static", "ours"):
                for plan in PLANS:
                    took = plans.seconds(schedule, plans.planned(schedule, plan)[1])
                    found.setdefault((schedule, plan), []).append(took / drawn)
        for schedule in ("static", "ours"):
            means = [f"{statistics.fmean(found[schedule, plan]):.3f}" for plan in PLANS]
            rows.append((num_ranks, mix, schedule, *means))
    harness.print_table(f"ranks | lengths | schedule | {' | '.join(PLANS)}", rows)


def layout(num_ranks: int, num_layers: int) -> str:
    """Megatron's layout of two chunks per rank whose last stage has the output layer alone."""
    stages = 2 * num_ranks - 1
    counts = [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]
    layers = ["t" * count for count in counts]
    return shlex.quote("|".join([f"E{layers[0]}", *layers[1:], "L"]))


def _run(words: list[str], folder: Path, name: str) -> bool:
    """Run one benchmark; its output goes to the terminal and into a file."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name(f"bench_{words[0]}.py")
    command = [sys.executable, str(script), *words[1:], "--json", str(folder / f"{name}.json")]
    with (
        (folder / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
        return process.wait() == 0


if __name__ == "__main__":
    exit_with(main)
