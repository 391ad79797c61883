"""The picture of the schedules' page shows what its table says."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from plot_schedules import at_a_glance  # noqa: E402


def test_every_line_of_the_table_is_drawn() -> None:
    page = (ROOT / "docs" / "benchmarks" / "schedule-h200.md").read_text()
    section = page.split("## At a glance", 1)[1].split("\n## ", 1)[0]
    rows = at_a_glance(page)
    assert len(rows) == section.count("\n| hidden")
    assert all(f"{row.ratio:.3f}" in section and row.best in section for row in rows)
