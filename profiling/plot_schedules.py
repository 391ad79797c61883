#!/usr/bin/env python
"""Draw the table "At a glance" of docs/benchmarks/schedule-h200.md: ours over the best static
schedule.

    python profiling/plot_schedules.py        # writes docs/images/schedule-h200.png
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "benchmarks" / "schedule-h200.md"
_PICTURE = _ROOT / "docs" / "images" / "schedule-h200.png"


@dataclass(frozen=True)
class Row:
    """A line of the table: what ran, with which static schedule it is compared, and the ratio."""

    label: str
    best: str
    ratio: float


def main(argv: Sequence[str] | None = None) -> int:
    """Read, draw, say where the picture is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--page", type=Path, default=_PAGE)
    parser.add_argument("--png", type=Path, default=_PICTURE)
    args = parser.parse_args(argv)
    rows = at_a_glance(args.page.read_text())
    if not rows:
        sys.exit(f"error: {args.page} has no table under 'At a glance'")
    _draw(rows, args.png)
    print(args.png)
    return 0


def at_a_glance(page: str) -> list[Row]:
    """The lines of the page's first table."""
    section = page.split("## At a glance", 1)[-1].split("\n## ", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    rows = []
    for model, microbatches, best, _, ratio, *_ in cells[2:]:
        number = re.search(r"\d\.\d+", ratio)
        if number:
            label = f"{model.replace('`', '')}, {microbatches} microbatches"
            rows.append(Row(label, best, float(number[0])))
    return rows


def _draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 1.2))
    places = range(len(rows) - 1, -1, -1)
    colours = ["#2b6cb0" if row.ratio <= 1 else "#c05621" for row in rows]
    gains = [row.ratio - 1 for row in rows]
    axes.barh(list(places), gains, left=1.0, color=colours, height=0.6)
    axes.axvline(1.0, color="black", linewidth=1)
    for place, row in zip(places, rows, strict=True):
        side = -1 if row.ratio <= 1 else 1
        axes.text(
            row.ratio + side * 0.003, place, f"{row.ratio:.3f}", va="center",
            ha="right" if side < 0 else "left",
        )  # fmt: skip
    axes.set_yticks(list(places), [row.label for row in rows])
    ratios = [row.ratio for row in rows]
    axes.set_xlim(min(ratios) - 0.08, max(1.05, *ratios) + 0.03)
    axes.set_xlabel("step time, ours / best static schedule (left: faster)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
