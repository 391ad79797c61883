"""Command lines that the schedule benchmark refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from bench_schedule import parse_arguments  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ranks 0", "--ranks 0: must be at least 1"),
        ("--microbatches 4 0", "--microbatches 0: must be at least 1"),
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--sleep-ms -1", "--sleep-ms -1: must be above 0"),
        ("--schedules split0", "--schedules split0: chunks 0: must be at least 1"),
        ("--schedules split1 --cap 0.1p", "--cap: 0.1p whole-model activations"),
        ("--schedules split1 --inject nonsense", "--dpp-inject nonsense: expected"),
        ("--ranks 2 --microbatches 3 --schedules static2", "a multiple of the ranks, 2; 4 would"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_schedule.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
