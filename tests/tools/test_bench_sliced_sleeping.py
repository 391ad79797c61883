"""The benchmark of slices on sleeping stages: the arms that it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from bench_sliced_sleeping import arms, parse_arguments  # noqa: E402


def test_each_arm_runs_all_tokens_and_slices_wait_less() -> None:
    lengths = [40_000, 20_000] + [500, 1000, 3000, 8000] * 5
    found = arms(argparse.Namespace(ranks=4), lengths)
    assert [name for name, _, _ in found] == ["static, packed", "static, sliced", "dynamic, sliced"]
    for _, _, rows in found:
        assert sorted(length for row in rows for length in row.lengths) == sorted(lengths)
    packed, sliced, dynamic = (pipeline.run(rows).makespan for _, pipeline, rows in found)
    assert dynamic < sliced < packed
    assert [max(len(row.ends) for row in rows) > 1 for _, _, rows in found] == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ranks 1", "--ranks 1: expected 2 or more"),
        ("--shortest 9 --longest 8", "--shortest 9 --longest 8: expected 1 <= shortest <= longest"),
        ("--sequences 7", "--sequences 7 --batches 2: expected twice the ranks or more, and 1"),
        ("--seconds 0", "--seconds 0.0: must be above 0"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_sliced_sleeping.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
