"""One run under all its names; runs without traces; two runs compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report import (
    aggregate_command,
    monitor_command,
    report_command,
)
from megatron.dpp.report.run_files import find_run, write_state
from tests.report.synthetic import Run, write


def metrics(home: Path, count: int = 30, first: float = 9.0) -> Path:
    """A home with metrics of some iterations, a command and a checkpoint."""
    (home / "checkpoints" / "iter_0000020").mkdir(parents=True)
    lines = [
        {"iteration": i, "train_iters": 50, "loss": first / i, "grad_norm": 1.5, "ms": 500.0,
         "tokens": 2000 + i, "lr": 0.1}
        for i in range(1, count + 1)
    ]  # fmt: skip
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "command").write_text(f"torchrun x.py --num-layers 8 --save {home}/checkpoints\n")
    return home


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """``root`` with a run below ``runs``, and the links that a launch makes."""
    root = tmp_path / "root"
    home = metrics(root / "runs" / "20260101-gpt")
    folder = write(Run(ranks=2), home / "traces")
    (root / "runs" / "latest").symlink_to(home.name)
    (root / "benchmark").mkdir()
    (root / "benchmark" / folder.name).symlink_to(folder)
    return root


SPELLINGS = (
    "runs/latest", "runs/20260101-gpt", "runs/latest/", "runs/latest/traces",
    "benchmark/data-1-pipeline-2-tensor-1-dpp",
    "runs/latest/traces/data-1-pipeline-2-tensor-1-dpp",
    "runs/20260101-gpt/metrics.jsonl", "../root/runs/latest", "runs/../runs/latest",
)  # fmt: skip


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert report_command.main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_spellings_of_a_run_mean_one_place(
    traced: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = traced / "runs" / "20260101-gpt"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for directory in (elsewhere, traced):  # from another directory names count from the root
        monkeypatch.chdir(directory)
        for name in SPELLINGS:
            place = find_run(name, traced)
            assert place.home == home, (directory, name)
            assert place.traces() == home / "traces" / "data-1-pipeline-2-tensor-1-dpp"
    with pytest.raises(DataError, match="runs/none: no such directory"):
        find_run("runs/none", traced)
    first = report_of(capsys, str(home))
    assert first["training"]["flags"]["--num-layers"] == "8" and first["run"]["pipeline"] == 2
    assert "Loss falls from 9 to 0.3" in Path(first["run"]["directory"], "report.html").read_text()
    for words in (["--benchmark_dir", SPELLINGS[4]], [SPELLINGS[3]], []):
        assert report_of(capsys, *words) == first
    for words in (["--benchmark_dir", SPELLINGS[4]], []):
        assert aggregate_command.main(words) == 0
        assert f"in {place.traces()}/aggregated.json" in capsys.readouterr().out
        assert monitor_command.main([*words, "--once"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{place.traces()}: ended\nIteration 30 of 50")


def test_a_run_without_a_trace_has_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = metrics(tmp_path / "run")
    write_state(home, "running")
    assert report_command.main([str(home)]) == 0
    text = capsys.readouterr().out
    said = "Iteration 30 of 50, running, about 10 s left, 4,031 tokens/s in the median, "
    assert f"{said}checkpoint 20." in text
    assert "Loss 9 at iteration 1, 0.3 at 30." in text and "train with --dpp-trace" in text
    page = (home / "report.html").read_text()
    assert "Loss falls" in page and "--dpp-trace" in page and "<dd>iteration 20</dd>" in page
    assert monitor_command.main([str(home), "--once"]) == 0
    text = capsys.readouterr().out
    assert f"{said}checkpoint 20." in text and "train with --dpp-trace" in text
    assert report_command.main([str(home), "--iteration", "3"]) == 2
    assert "--iteration 3: the run has no trace" in capsys.readouterr().err
    write_state(home, "failed", "rank 1")
    assert monitor_command.main([str(home)]) == 3
    text = capsys.readouterr().out
    assert "failed: rank 1" in text and "left" not in text


def test_a_baseline_is_compared_step_by_step(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, page = str(traced / "runs" / "latest"), str(tmp_path / "page.html")
    same, other = metrics(tmp_path / "b", 20), metrics(tmp_path / "c", 20, 7.0)
    assert report_command.main([home, "--baseline", str(same), "--output", page]) == 0
    said = "Equal bit by bit in all 20 common steps: loss, grad_norm, lr."
    assert said in capsys.readouterr().out and said in Path(page).read_text()
    found = report_of(capsys, home, "--baseline", str(other), "--output", page)
    assert found["difference"] == {
        "common": 20, "equal": ["grad_norm", "lr"], "largest": {"loss": 2.0},
    }  # fmt: skip
    assert "Different in the 20 common steps: loss by at most 2." in found["sentences"]
    files = [str(tmp_path / f"{name}.jsonl") for name in "bc"]
    for place, file in zip((same, other), files, strict=True):
        (place / "metrics.jsonl").rename(file)
    named = report_of(capsys, files[0], "--baseline", files[1], "--output", page)
    assert named["difference"] == found["difference"]
    assert monitor_command.main([files[0], "--once"]) == 0
    assert "Iteration 20 of 50" in capsys.readouterr().out
    assert report_command.main([home, str(same), str(other)]) == 2
    assert "3 runs" in capsys.readouterr().err


def test_the_monitor_follows_a_link_to_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "latest"
    for name, state in (("one", "running"), ("two", "finished")):
        write_state(metrics(tmp_path / name, 5), state)
    link.symlink_to("one")

    def move(seconds: float) -> None:
        link.unlink()
        link.symlink_to("two")

    monkeypatch.setattr("megatron.dpp.report.monitor_command.time.sleep", move)
    assert monitor_command.main([str(link)]) == 0
    found = re.findall(r"^/\S+/(\w+): (\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert found == [("one", "running"), ("two", "finished")]
