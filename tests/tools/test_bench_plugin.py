"""The command line and the lengths of the plugin's benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_plugin  # noqa: E402


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["bench_plugin.py", *words])
    return bench_plugin.parse_arguments()


def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for words, said in (
        (["--sources", str(tmp_path)], "neither core_v0.16.1 nor core_v0.16.1.tar.xz is there"),
        (["--untimed", "12"], "--untimed 12: must be below --iterations 12"),
    ):
        with pytest.raises(SystemExit) as ended:
            arguments(monkeypatch, *words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_lengths_are_unlike_and_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    args = arguments(monkeypatch, "--sources", str(tmp_path), "--versions", "v")
    drawn = bench_plugin.lengths(args)
    assert drawn == bench_plugin.lengths(args) and len(drawn) == 16
    assert len(set(drawn)) > 8 and all(16 <= one <= 2048 and one % 16 == 0 for one in drawn)
