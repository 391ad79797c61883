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
        (
            ["--sources", str(tmp_path)],
            "neither main-2026-08-22 nor main-2026-08-22.tar.xz is there",
        ),
        (["--untimed", "8"], "--untimed 8: must be below --block 8"),
        (["--arms", "static,late-static"], "--arms late-static: expected one of static,"),
    ):
        with pytest.raises(SystemExit) as ended:
            arguments(monkeypatch, *words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_lengths_are_unlike_and_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    args = arguments(monkeypatch, "--sources", str(tmp_path), "--versions", "v")
    for row, most in (("unlike", 16 * 1500), ("packed", 16 * 2048)):
        drawn = bench_plugin.lengths(args, row)
        assert drawn == bench_plugin.lengths(args, row) and len(drawn) == 16 and sum(drawn) < most
        assert len(set(drawn)) > 5 and all(16 <= one <= 2048 and one % 16 == 0 for one in drawn)
    assert sum(bench_plugin.lengths(args, "packed")) > 0.9 * 16 * 2048


def test_own_graphs_and_queues_are_process_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "v").mkdir()
    words = ("--sources", str(tmp_path), "--versions", "v", "--queues", "1,8")
    args = arguments(monkeypatch, *words, "--arms", "static,static-graphs,megatron,dynamic")
    assert [*bench_plugin.process_groups(args, "equal")] == [
        ("1", ["static", "dynamic"]),
        ("8", ["static", "megatron", "dynamic"]),
        ("8", ["static-graphs"]),
    ]
    assert len([*bench_plugin.process_groups(args, "unlike")]) == 2
