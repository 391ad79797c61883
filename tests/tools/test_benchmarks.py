"""Benchmarks: command lines that they refuse, and how they plan, read and compare."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import exit_with

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_parallel  # noqa: E402
from bench_whatif import EverySecond, row  # noqa: E402


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("schedule", "--microbatches 4 0", "--microbatches 0: must be at least 1"),
        ("schedule", "--sleep-ms -1", "--sleep-ms -1: must be above 0"),
        ("schedule", "--schedules split0", "--schedules split0: chunks 0: must be at least 1"),
        ("schedule", "--schedules split1 --cap 0.1p", "--cap: 0.1p whole-model activations"),
        ("schedule", "--ranks 2 --microbatches 3 --schedules static2",
         "a multiple of the ranks, 2; 4 would"),
        ("schedule", "--schedules linkssplit2", "expected static, megatron"),
        ("parallel", "--ways dp,xp", "--ways xp: expected one of dp,"),
        ("parallel", "--batch 3", "--batch 3: must be a multiple of --devices 2"),
        ("plugin", "--sources .", "neither main-2026-08-22 nor main-2026-08-22.tar.xz is there"),
        ("plugin", "--untimed 8", "--untimed 8: must be below --block 8"),
        ("plugin", "--arms static,late-static", "--arms late-static: expected one of static,"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(
    name: str, arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    benchmark = importlib.import_module(f"bench_{name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"bench_{name}.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        exit_with(benchmark.parse_arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_each_way_to_split_a_model_trains_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Slow:
    delays_messages = True

    def message_seconds(self, source: int, destination: int, number: int) -> float:
        return 0.04


def test_what_if_slows_links_in_every_second_iteration_and_compares_mean_times() -> None:
    """In an iteration a channel carries one message per microbatch."""
    injector = EverySecond(Slow(), num_microbatches=2)
    late = [injector.message_seconds(0, 1, number) for number in range(8)]
    assert late == [0, 0, 0.04, 0.04, 0, 0, 0.04, 0.04]
    found = row("all", [(1.0, 0.9), (3.0, 2.8)], [1.8, 1.7])
    assert "gain measured 12.5%, predicted 7.5%" in found
    assert row("all", [], [1.0]) == "all: none"
