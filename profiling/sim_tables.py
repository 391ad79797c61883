"""Hold the simulator to the design's tables: makespan over the busiest rank's own work, ours beside
the design's figures.

Writes ``docs/benchmarks/simulator.md``. Takes about an hour of one core with 20 seeds (``--cache``
keeps what is finished).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from megatron.dpp.sim import (  # noqa: E402
    CONDITIONS,
    Costs,
    Result,
    ScheduleConfig,
    Shape,
    condition_costs,
    run_static,
)
from megatron.dpp.sim.conditions import FIXED_CONDITIONS  # noqa: E402

SHAPES = [(p, k * p) for p in (4, 8, 16) for k in (2, 4, 8)]
COLUMNS = ("unif", "jit.1", "jit.3", "str1.5", "tr1", "trN", "lnk2", "lnkR", "head", "len")
BETA = 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """A schedule; ``design`` are the design's figures for v = 2 in the order of COLUMNS, and its
    mean and peak.
    """

    title: str
    plan: ScheduleConfig | str
    design: tuple[float, ...] = ()
    means: tuple[float, float, float] = (0, 0, 0)

    def run(self, shape: Shape, costs: Costs) -> Result:
        if isinstance(self.plan, str):
            return run_static(self.plan, shape, costs, beta=BETA)
        return self.plan.run(shape, costs)


ROWS = (
    Row(
        "Megatron interleaved (v = 1: 1F1B)",
        ScheduleConfig(policy="megatron", cap="megatron", split_backward=False),
        (1.126, 1.129, 1.167, 1.047, 1.126, 1.269, 1.232, 1.217, 1.084, 1.494, 1.163, 1.47),
        (1.402, 1.163, 1.126),
    ),
    Row(
        "ZB-H1",
        "zb-h1",
        (1.044, 1.069, 1.145, 1.022, 1.075, 1.278, 1.430, 1.281, 1.029, 1.391, 1.147, 1.00),
        (1.197, 1.147, 1.126),
    ),
    Row(
        "earlier DPP rule",
        ScheduleConfig(policy="depth-first", cap="none", split_backward=False),
        (1.195, 1.196, 1.227, 1.073, 1.191, 1.289, 1.202, 1.224, 1.126, 1.396, 1.193, 6.00),
        (1.241, 1.193, 1.137),
    ),
    Row(
        "dynamic, fused, megatron cap",
        ScheduleConfig(cap="megatron", split_backward=False),
        (1.126, 1.129, 1.163, 1.046, 1.124, 1.247, 1.168, 1.170, 1.084, 1.477, 1.151, 1.47),
    ),
    Row(
        "dynamic, split, strict",
        ScheduleConfig(cap="strict", beta=BETA),
        (1.070, 1.070, 1.080, 1.015, 1.056, 1.109, 1.109, 1.106, 1.033, 1.192, 1.074, 1.47),
        (1.217, 1.074, 1.053),
    ),
    Row(
        "dynamic, split, megatron cap",
        ScheduleConfig(cap="megatron", beta=BETA),
        (1.042, 1.039, 1.045, 1.015, 1.033, 1.057, 1.064, 1.063, 1.028, 1.152, 1.047, 1.47),
        (1.173, 1.047, 1.034),
    ),
    Row("dynamic, split, 1.5p", ScheduleConfig(cap="1.5p", beta=BETA), means=(1.090, 1.046, 1.027)),
    Row("dynamic, split, 2p", ScheduleConfig(cap="2p", beta=BETA), means=(1.079, 1.042, 1.024)),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Mean ratio of a condition, its standard error, and the largest peak in whole ranks'
    activations over p.
    """

    mean: float
    error: float
    peak: float


def cell(task: tuple[int, int, str, int]) -> Cell:
    """One (row, v, condition): the mean over all shapes and seeds."""
    row, v, condition, seeds = ROWS[task[0]], task[1], task[2], task[3]
    if condition in FIXED_CONDITIONS:
        seeds = 1
    ratios, variance, peak = [], 0.0, 0.0
    for p, m in SHAPES:
        shape = Shape(p, v, m)
        found = []
        for seed in range(seeds):
            result = row.run(shape, condition_costs(condition, shape, seed))
            found.append(result.ratio)
            chunks = 1 if isinstance(row.plan, str) else v
            peak = max(peak, max(result.peak_held) / (chunks * p))
        ratios.append(statistics.fmean(found))
        variance += statistics.variance(found) / seeds if seeds > 1 else 0.0
    return Cell(statistics.fmean(ratios), variance**0.5 / len(SHAPES), peak)


def measure(
    chunks: list[int], seeds: int, workers: int, cache: Path | None
) -> dict[tuple[int, int, str], Cell]:
    """Every cell, in parallel processes; those that ``cache`` already has are not run again."""
    keys = [
        (r, v, c)
        for v in chunks
        for c in CONDITIONS
        for r, row in enumerate(ROWS)
        if v == 2 or any(row.means)
    ]
    cells = {}
    if cache and cache.exists():
        for line in cache.read_text().splitlines():
            *key, mean, error, peak = json.loads(line)
            cells[tuple(key)] = Cell(mean, error, peak)
    left = [key for key in keys if key not in cells]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        for key, found in zip(left, pool.map(cell, [(*k, seeds) for k in left]), strict=True):
            cells[key] = found
            if cache:
                with cache.open("a") as file:
                    file.write(json.dumps([*key, *dataclasses.astuple(found)]) + "\n")
    return cells


def first_table(cells: dict[tuple[int, int, str], Cell]) -> list[str]:
    """v = 2, condition by condition."""
    lines = ["| v = 2 | " + " | ".join(COLUMNS) + " | mean of 14 | peak |"]
    lines.append("|---" * (len(COLUMNS) + 3) + "|")
    for number, row in enumerate(ROWS):
        if not row.design:
            continue
        ours = [cells[number, 2, name] for name in COLUMNS]
        peak = max(cells[number, 2, name].peak for name in CONDITIONS)
        values = [c.mean for c in ours] + [mean_of_14(cells, number, 2), peak]
        lines.append(f"| {row.title} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        lines.append("| *design* | " + " | ".join(f"*{value:.3f}*" for value in row.design) + " |")
        errors = [f"{c.error:.3f}" for c in ours]
        lines.append("| *standard error* | " + " | ".join(errors) + " | | |")
    return lines


def second_table(chunks: list[int], cells: dict[tuple[int, int, str], Cell]) -> list[str]:
    """Means of the fourteen conditions for each v."""
    rows = [(number, row) for number, row in enumerate(ROWS) if any(row.means)]
    lines = ["| mean of 14 | " + " | ".join(row.title for _, row in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for place, v in enumerate((1, 2, 4)):
        if v not in chunks:
            continue
        ours = [f"{mean_of_14(cells, number, v):.3f}" for number, _ in rows]
        lines.append(f"| v = {v} | " + " | ".join(ours) + " |")
        design = [f"*{row.means[place]:.3f}*" for _, row in rows]
        lines.append("| *design* | " + " | ".join(design) + " |")
    return lines


def mean_of_14(cells: dict[tuple[int, int, str], Cell], row: int, v: int) -> float:
    return statistics.fmean(cells[row, v, condition].mean for condition in CONDITIONS)


def large_shape() -> str:
    """The design's largest shape, timed."""
    shape = Shape(64, 2, 512)
    costs = condition_costs("trN", shape, 0)
    texts = []
    for title, number in (("interleaved", 0), ("dynamic, split, megatron cap", 5)):
        start = time.perf_counter()
        ratio = ROWS[number].run(shape, costs).ratio
        texts.append(f"{title} {ratio:.3f} ({time.perf_counter() - start:.1f} s)")
    return ", ".join(texts)


TEXT = """# The simulator beside the design's tables

Made by `python profiling/sim_tables.py --seeds {seeds}`. Each figure is makespan / the busiest
rank's own work, the mean over p = 4, 8, 16, m = 2p, 4p, 8p and {seeds} seeds; `docs/simulator.md`
defines the conditions. Draws are not those of the design's own simulator, so its figures for random
conditions carry a sampling error at least as large as ours.

{first}

{second}

p = 64, v = 2, m = 512, every rank transiently slow (trN), one seed: {large}. The design:
interleaved 1.395, dynamic 1.039.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="keep finished cells here, to go on later")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/simulator.md"))
    parser.add_argument("--chunks", default="2,1,4", help="values of v; 2 must be one of them")
    args = parser.parse_args()
    chunks = [int(word) for word in args.chunks.split(",")]
    cells = measure(chunks, args.seeds, args.workers, args.cache)
    text = TEXT.format(
        seeds=args.seeds,
        first="\n".join(first_table(cells)),
        second="\n".join(second_table(chunks, cells)),
        large=large_shape(),
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
