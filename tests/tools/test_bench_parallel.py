"""The flags of the ways to split one model."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_parallel  # noqa: E402


def test_each_way_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_parallel.py", "--devices", "4", "--layers", "32"])
    args = bench_parallel.parse_arguments()
    last = {}
    for name, way in bench_parallel.WAYS.items():
        words = bench_parallel.flags(args, way)
        pairs = {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}
        assert (pairs["--num-layers"], pairs["--global-batch-size"]) == ("32", "16")
        last[name] = pairs
    assert last["pp"]["--pipeline-model-parallel-size"] == "4"
    assert last["pp"]["--num-layers-per-virtual-pipeline-stage"] == "4"
    assert last["dp"]["--pipeline-model-parallel-size"] == "1"
    assert last["cp"]["--context-parallel-size"] == "4"
