"""The benchmark of slices on sleeping stages: the arms that it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from bench_sliced_sleeping import arms  # noqa: E402


def test_each_arm_runs_all_tokens_and_slices_wait_less() -> None:
    lengths = [40_000, 20_000] + [500, 1000, 3000, 8000] * 5
    found = arms(argparse.Namespace(ranks=4), lengths)
    assert [name for name, _, _ in found] == ["static, packed", "static, sliced", "dynamic, sliced"]
    for _, _, rows in found:
        assert sorted(length for row in rows for length in row.lengths) == sorted(lengths)
    packed, sliced, dynamic = (pipeline.run(rows).makespan for _, pipeline, rows in found)
    assert dynamic < sliced < packed
    assert [max(len(row.ends) for row in rows) > 1 for _, _, rows in found] == [False, True, True]
