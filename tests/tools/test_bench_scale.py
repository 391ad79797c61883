"""The benchmarks that bench_scale.py starts take the words that it gives them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.launcher import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "profiling"))
import bench_plugin
import bench_scale
import bench_schedule


def parsed(monkeypatch: pytest.MonkeyPatch, module: Any, words: list[str]) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result: argparse.Namespace = module.parse_arguments()
    return result


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("group", ["experts", "equal"])
def test_schedules_fit_the_devices(
    monkeypatch: pytest.MonkeyPatch, group: str, devices: int
) -> None:
    for words in bench_scale.commands(group, devices, "").values():
        args = parsed(monkeypatch, bench_schedule, words[1:])
        assert args.ranks * args.tensor * args.expert_parallel == devices
        assert all(args.layers % (args.ranks * n.num_chunks) == 0 for n in args.names if not n.laid)
        if args.layout:
            stages = args.layout.split("|")
            assert len(stages) == 2 * args.ranks and args.layout.count("t") == args.layers


@pytest.mark.parametrize("devices", [4, 8])
def test_megatron_lm_is_cut_evenly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: int
) -> None:
    (tmp_path / "main-2026-08-22").mkdir()
    (words,) = bench_scale.commands("plugin", devices, str(tmp_path)).values()
    args = parsed(monkeypatch, bench_plugin, words[1:])
    assert args.ranks == devices


def test_a_failed_benchmark_does_not_end_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {"first": "schedule --ranks 0", "second": "schedule --ranks 0"}
    monkeypatch.setitem(bench_scale.GROUPS, "equal", bad)
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "equal", "--out", str(tmp_path / "out")])
    assert bench_scale.main() == 1
    assert "failed: equal first, equal second" in capfd.readouterr().err
    assert "--ranks 0: must be at least 1" in (tmp_path / "out" / "equal-second.log").read_text()
