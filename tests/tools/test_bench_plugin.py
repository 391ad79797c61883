"""The command line and the lengths of the plugin's benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_plugin  # noqa: E402
import megatron_sources  # noqa: E402


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["bench_plugin.py", *words])
    return bench_plugin.parse_arguments()


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


def test_each_table_is_a_command_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "v").mkdir()
    words = ["--sources", str(tmp_path), "--versions", "v"]
    every = bench_plugin.parse_cases([*words, "--cases", ",".join(bench_plugin.CASES)])
    assert [args.cases for args in every] == list(bench_plugin.CASES)
    fp8 = next(args for args in every if args.cases == "fp8")
    assert "--fp8-format hybrid" in fp8.more and "--swiglu" in fp8.more
    small = bench_plugin.parse_cases([*words, "--cases", "long", "--sequence", "64"])
    assert (small[0].sequence, small[0].layers_of) == (64, "transformer_engine")
    assert [args.cases for args in bench_plugin.parse_cases(words)] == [""]
    with pytest.raises(SystemExit):
        bench_plugin.parse_cases([*words, "--cases", "short"])
    assert "--cases short: expected of lengths, " in capsys.readouterr().err


def test_an_arm_separates_w_from_graphs() -> None:
    name, kind, settings = bench_plugin.arm_of("eager-megatron")
    assert (name, kind, settings["policy"]) == ("eager-megatron", "dynamic", "megatron")
    assert (settings["split_backward"], settings["cuda_graphs"]) == ("on", "off")


def rank_that_ends(code: int) -> subprocess.Popen[str]:
    """A process that ends with ``code``, or sleeps long where it is negative."""
    program = f"import sys, time; time.sleep({600 * (code < 0)}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", program], text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("codes", "seconds", "said"),
    [((0, 0), 100, ""), ((0, 3), 100, "rank 1 ended with exit code 3"),
     ((0, -1), 1, "no end within 1 s")],
)  # fmt: skip
def test_ranks_that_fail_or_do_not_end_are_ended(
    codes: tuple[int, int], seconds: float, said: str
) -> None:
    ranks = [rank_that_ends(code) for code in codes]
    assert megatron_sources.why_failed(ranks, seconds) == said
    assert all(one.poll() is not None for one in ranks)
