"""Command lines that benchmarks refuse."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import exit_with

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("lengths", "--ranks 1", "--ranks 1: expected 2 or more"),
        ("lengths", "--ranks 4,x", "--ranks 4,x: expected 2 or more, or sizes like 4,8"),
        ("lengths", "--lengths short", "--lengths short: expected one of sft, long, packed8k"),
        ("lengths", "--ranks 4 --microbatches 6",
         "--microbatches 6: must be a multiple of 4 ranks"),
        ("lengths", "--batches 0", "--batches 0: must be above 0"),
        ("schedule", "--ranks 0", "--ranks 0: must be at least 1"),
        ("schedule", "--microbatches 4 0", "--microbatches 0: must be at least 1"),
        ("schedule", "--rounds 0", "--rounds 0: must be at least 1"),
        ("schedule", "--sleep-ms -1", "--sleep-ms -1: must be above 0"),
        ("schedule", "--schedules split0", "--schedules split0: chunks 0: must be at least 1"),
        ("schedule", "--schedules split1 --cap 0.1p", "--cap: 0.1p whole-model activations"),
        ("schedule", "--schedules split1 --inject nonsense", "--inject nonsense: unknown form"),
        ("schedule", "--ranks 2 --microbatches 3 --schedules static2",
         "a multiple of the ranks, 2; 4 would"),
        ("schedule", "--schedules capstatic2", "expected static, megatron"),
        ("schedule", "--schedules linkssplit2", "expected static, megatron"),
        ("parallel", "--ways dp,xp", "--ways xp: expected one of dp,"),
        ("parallel", "--batch 3", "--batch 3: must be a multiple of --devices 2"),
        ("plugin", "--sources .", "neither main-2026-08-22 nor main-2026-08-22.tar.xz is there"),
        ("plugin", "--untimed 8", "--untimed 8: must be below --block 8"),
        ("plugin", "--arms static,late-static", "--arms late-static: expected one of static,"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(
    name: str,
    arguments: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = importlib.import_module(f"bench_{name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"bench_{name}.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        exit_with(benchmark.parse_arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
