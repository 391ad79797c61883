"""One run under all its names; runs without traces; several runs beside each other."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.files.locks import lock_directory
from megatron.dpp.report import (
    aggregate_command,
    monitor_command,
    report_command,
    runs_command,
)
from megatron.dpp.report.run_files import find_run, read_training
from tests.report.synthetic import Run, write


def metrics(home: Path, count: int = 30, first: float = 9.0) -> Path:
    """A home with metrics of some iterations, settings and two checkpoints."""
    home.mkdir(parents=True, exist_ok=True)
    lines = [
        {"iteration": i, "lm loss": first / i, "grad norm": 1.5, "tokens/s": 4200.0 + i,
         "seconds": 0.5, "peak memory": 3 << 30}
        for i in range(1, count + 1)
    ]  # fmt: skip
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "settings.yaml").write_text("num_layers: 8\nhidden_size: 128\ntrain_iters: 50\n")
    for iteration in (10, 20):
        (home / "checkpoints" / f"iter_{iteration:07d}").mkdir(parents=True)
    return home


def test_names_in_settings_count_from_where_a_run_was_started(tmp_path: Path) -> None:
    """They counted from the run's directory, so that `--save llama-checkpoints` was never found."""
    home = metrics(tmp_path / "runs" / "a", count=15)
    (tmp_path / "ck" / "iter_0000012").mkdir(parents=True)
    (home / "metrics.jsonl").rename(tmp_path / "own.jsonl")
    with (home / "settings.yaml").open("a") as file:
        file.write(f'save: "ck"\nmetrics_file: "own.jsonl"\n# working_directory: "{tmp_path}"\n')
    found = read_training(home)
    assert found.checkpoints == [12] and found.iteration == 15


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


def report_of(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert report_command.main([name, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_spellings_of_a_run_give_the_same_report(
    traced: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traced)
    first = report_of(str(traced / "runs" / "20260101-gpt"), capsys)
    assert first["flags"]["--num-layers"] == 8 and first["run"]["pipeline"] == 2
    page = Path(first["run"]["directory"], "report.html")
    text = page.read_text()
    assert "Loss falls from 9 to 0.3" in text
    for name in SPELLINGS:
        page.unlink()
        assert report_of(name, capsys) == first, name
        assert page.read_text() == text, name


def test_all_spellings_mean_one_place_from_everywhere(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = traced / "runs" / "20260101-gpt"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for directory in (traced, elsewhere):  # from another directory names count from the root
        monkeypatch.chdir(directory)
        for name in SPELLINGS:
            place = find_run(name, traced)
            assert place.home == home, (directory, name)
            assert place.traces() == home / "traces" / "data-1-pipeline-2-tensor-1-dpp"
    with pytest.raises(DataError, match="runs/none: no such directory"):
        find_run("runs/none", traced)


def test_the_other_commands_find_it_too(
    traced: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traced)
    folder = find_run("runs/latest").need_traces()
    for name in SPELLINGS[:5]:
        assert aggregate_command.main([name]) == 0
        assert f"in {folder}/aggregated.json" in capsys.readouterr().out
        assert monitor_command.main([name, "--once"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{folder}\niteration 30 of 50  loss 0.3000  4230 tokens/s")


def test_a_run_without_a_trace_has_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = metrics(tmp_path / "run")
    assert report_command.main([str(home), "--plots", str(home / "plots")]) == 0
    text = capsys.readouterr().out
    assert "Iteration 30 of 50, about 10 s left, 4,216 tokens/s in the median." in text
    assert "Loss 9 at iteration 1, 0.3 at iteration 30." in text
    assert "The last checkpoint is that of iteration 20." in text and "train with --trace" in text
    page = (home / "report.html").read_text()
    for words in ("Loss falls", "Gradient norm", "tokens/s", "Peak memory", "<code>--trace</code>"):
        assert words in page
    assert monitor_command.main([str(home), "--once"]) == 0
    text = capsys.readouterr().out
    assert "iteration 30 of 50  loss 0.3000" in text and "train with --trace" in text
    assert "10 s left  memory 3,072 MiB  checkpoint 20" in text
    assert "█" in text and "(iterations 1 to 30)" in text
    drawn = {path.stem for path in (home / "plots").iterdir()}
    assert drawn == {"loss", "grad-norm", "tokens-per-second", "memory", "iteration-time"}
    for option in (["--costs", "x"], ["--iteration", "3"]):
        assert report_command.main([str(home), *option]) == 2
        assert f"{option[0]}" in (error := capsys.readouterr().err) and "trace" in error


def test_several_runs_stand_beside_each_other(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = traced / "runs" / "latest"
    others = [metrics(tmp_path / name, 20, first) for name, first in (("b", 7.0), ("c", 6.0))]
    names = [str(each) for each in (home, *others)]
    page = tmp_path / "page.html"
    assert report_command.main([*names, "--output", str(page)]) == 0
    text = page.read_text()
    assert "<h2>3 runs compared</h2>" in text
    for name, loss in (("20260101-gpt", "0.3"), ("b", "0.35"), ("c", "0.3")):
        assert f">{name} {loss}<" in text  # at the ends of the curves of the loss
        assert f'data-label="{name}"' in text
    assert report_command.main([*names[:2], "--output", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("report:")[-1].split("\n", 1)[1])
    assert "<h2>Two runs compared</h2>" in page.read_text()


@pytest.mark.parametrize(
    ("homes", "labels"),
    [
        (("0102-030405-gpt-tp2-dp1", "0102-040506-gpt-tp1-dp1"), ("tp2", "tp1")),
        (("0102-030405-gpt-tp2", "0102-040506-gpt-tp2"), ("030405", "040506")),
        (("0102-030405-gpt-tp2", "wide"), ("0102-030405-gpt…", "wide")),
    ],
)
def test_labels_hold_what_tells_runs_apart(
    homes: tuple[str, str], labels: tuple[str, str], tmp_path: Path
) -> None:
    """Labels of two runs began with one date and ended before what differs."""
    page, names = tmp_path / "page.html", [str(metrics(tmp_path / name, 20)) for name in homes]
    assert report_command.main([*names, "--output", str(page)]) == 0
    assert all(f'data-label="{label}"' in page.read_text() for label in labels)


def test_a_run_has_ended_with_its_last_iteration(tmp_path: Path) -> None:
    """It counted as running for another minute."""
    for iterations, state in ((50, "ended"), (49, "running")):
        home = metrics(tmp_path / str(iterations), iterations)
        assert find_run(str(home)).state() == state


def test_a_run_of_another_user_is_named_and_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory of mode 0700 hid all runs beside it."""
    for name in ("mine", "theirs"):
        metrics(tmp_path / name, 5)
    is_file = Path.is_file

    def checked(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", checked)
    assert runs_command.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["run", "mine"]
    assert said.err == f"warning: {tmp_path}/theirs: Permission denied\n"


def test_runs_are_listed_with_their_state(
    traced: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traced)
    held = metrics(traced / "runs" / "held", 5)
    (traced / "runs" / "no-run").mkdir()
    old = time.time() - 3600
    for name in ("metrics.jsonl", "settings.yaml"):
        os.utime(traced / "runs" / "20260101-gpt" / name, (old, old))
        os.utime(held / name, (old + 60, old + 60))
    with lock_directory(held, "run"):
        assert runs_command.main([]) == 0
    head, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:3] == ["run", "started", "state"]
    assert first[0] == "20260101-gpt" and first[3:7] == ["ended", "30", "of", "50"]
    assert first[-2:] == ["20", "yes"]
    assert second[0] == "held" and second[3:7] == ["running", "5", "of", "50"]
    assert second[-1] == "no"
    assert runs_command.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["loss"] == "0.3"
    assert runs_command.main([str(traced / "benchmark")]) == 1
    assert "no run" in capsys.readouterr().err
