"""Runs of ``megatron-dpp train`` as a person sees them: progress, failures, Ctrl-C."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.dpp.report.run_files import read_state
from megatron.dpp_train.presets import flag_table
from megatron.dpp_train.presets.console import Progress
from tests.conftest import REPOSITORY

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --batch-size 8 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 1 --run-dir run"
)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    flag_table.table()
    return spawn(folder, "-m", "megatron.dpp", "train", *SMALL.split(), *words)


def spawn(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A Python process without GPUs, in a folder."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    # what a shell starts behind an ampersand ignores SIGINT
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeding,
    )  # fmt: skip


def left_over(folder: Path) -> list[int]:
    """Processes that work for the run in a folder."""
    return [each.pid for each in psutil.process_iter(["cmdline"])
            if str(folder) in " ".join(each.info["cmdline"] or [])]  # fmt: skip


def test_a_run_shows_its_progress_and_keeps_its_files(tmp_path: Path) -> None:
    words = "--mode 3d --procs 2 --pp 2 --max-steps 3 --save-interval 4"
    process = start(tmp_path, *words.split())
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step "))
    assert first < 40 and max(map(len, lines)) <= 80
    assert "tokens/s" in lines[first] and "left" in lines[first]
    assert any("PP2, dynamic pipeline, 2 processes on the CPU" in line for line in lines)
    assert lines[-1].startswith("finished: step 3 in ") and "validation" in lines[-1]
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "loss" in row] == [1, 2, 3]
    assert "iteration        3/" in (run / "train.log").read_text()
    assert "torch.distributed.run" in (run / "command").read_text()
    assert not (run / "checkpoints").exists()  # nothing is saved within three steps
    state = read_state(run)
    assert state is not None and state.state == "finished"
    assert list(state.times) == ["starting", "running", "finished"]
    assert not left_over(tmp_path)


LAUNCH = """
import os, sys
from pathlib import Path
from megatron.dpp_train.presets.launch import run
home, words = Path(sys.argv[1]), [sys.executable, *sys.argv[2:]]
flags = {"--metrics-file": str(home / "metrics.jsonl"), "--train-iters": "9"}
sys.exit(run(words, os.environ, home, home / "train.log", flags))
"""
"""A run in a folder, whose torchrun is Python with these arguments."""
RANK = """
import subprocess, sys, time
from megatron.dpp.errors import ConfigError, print_error, tell_torchrun

{begin}
with open({metrics!r}, "w") as file:
    print('{{"iteration": 1, "loss": 2.5, "ms": 1.0}}', file=file)
{end}
"""
"""Stands for a training script: its metrics, then an error or a long run."""
FAILURES = {
    "assert False": "exit code 1: AssertionError: assert False",
    "sys.exit(print_error(ConfigError('wrong')))": "exit code 2: wrong",
    "tell_torchrun('no room', printed=True); sys.exit(3)": "exit code 3: no room",
    "raise KeyError('part ' * 9999)": " part",
    "import os; os.kill(os.getpid(), 9)": "ended by SIGKILL",
}
"""End of a rank -> how its error ends."""


def launch(folder: Path, end: str, begin: str = "") -> subprocess.Popen[str]:
    metrics = str(folder / "metrics.jsonl")
    (folder / "rank.py").write_text(RANK.format(metrics=metrics, begin=begin, end=end))
    torchrun = ["-m", "torch.distributed.run", "--standalone", str(folder / "rank.py")]
    return spawn(folder, "-c", LAUNCH, str(folder), *torchrun)


@pytest.mark.parametrize("end", FAILURES)
def test_a_failed_rank_is_named_with_its_process_and_error(end: str, tmp_path: Path) -> None:
    process = launch(tmp_path, end)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    error, log = err.splitlines()
    assert "rank 0 (process " in error and error.endswith(FAILURES[end])
    assert log == f"log      {tmp_path / 'train.log'}"
    state = read_state(tmp_path)
    assert state is not None and state.state == "failed" and "rank 0" in str(state.by)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(1000)", str(tmp_path)]
    orphan = f"subprocess.Popen({words}, start_new_session=True)"
    begin = orphan if number != signal.SIGKILL else ""  # the kernel ends torchrun alone
    process = launch(tmp_path, "time.sleep(1000)", begin)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/9   loss 2.5000")
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    deadline = time.monotonic() + 60
    while left_over(tmp_path):
        assert time.monotonic() < deadline, left_over(tmp_path)
        time.sleep(0.1)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        by = "Ctrl-C" if number == signal.SIGINT else number.name
        assert err == f"stopped by {by}; nothing is left running\n"
        state = read_state(tmp_path)
        assert state is not None and (state.state, state.by) == ("stopped", by)


def test_a_stopped_torchrun_is_named_while_the_run_waits_for_it(tmp_path: Path) -> None:
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    words = [sys.executable, "-c", LAUNCH, str(tmp_path), "-c", stops]
    with subprocess.Popen(words, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        (torchrun,) = psutil.Process(process.pid).children()
        torchrun.resume()
        assert process.wait(60) == 0
    assert f"process {torchrun.pid} (" in said and "is stopped on" in said and "-CONT" in said


def test_a_run_whose_directory_is_lost_ends_as_torchrun_does(tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    loses = "import shutil, sys; shutil.rmtree(sys.argv[1]); sys.exit(3)"
    words = [sys.executable, "-c", LAUNCH, str(home), "-c", loses, str(home)]
    done = subprocess.run(words, cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    state, error, _ = done.stderr.splitlines()
    assert "its state cannot be written (No such file" in state and "exit code 3" in error


def test_a_hang_up_under_nohup_ends_nothing(tmp_path: Path) -> None:
    hangs_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
    words = [sys.executable, "-c", LAUNCH, str(tmp_path), "-c", hangs_up]
    ignoring = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    assert subprocess.run(words, cwd=REPOSITORY, preexec_fn=ignoring, check=False).returncode == 0


def test_a_line_holds_step_loss_rate_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = Progress(metrics, 100)
    progress.look()
    rows = [{"iteration": n, "loss": 4.0 / n, "ms": 500.0, "tokens": 2048} for n in (1, 2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    metrics.write_text(text[:-20])  # a line that is not whole yet
    progress.look()
    assert capsys.readouterr().out == "step   1/100   loss 4.0000   4,096 tokens/s   0:00:50 left\n"
    metrics.write_text(text + json.dumps({"iteration": 2, "validation_loss": 3.5}) + "\n")
    progress.look()
    assert capsys.readouterr().out == "step 2: validation loss 3.5000\n"
    assert progress.line() == "step   2/100   loss 2.0000   4,096 tokens/s   0:00:49 left"
    assert "loss 4.0000 -> 2.0000, validation 3.5000" in progress.summary()


@pytest.mark.slow
def test_deepspeed_engine_trains_saves_and_resumes_as_megatron_shards(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "own").mkdir()
    words = ["--mode", "deepspeed", "--zero-stage", "1", "--procs", "2", "--max-steps", "3"]
    theirs = [*words, "--engine", "deepspeed"]
    finish(start(tmp_path / "own", *words))
    finish(start(tmp_path, *theirs, "--save", "ck"))
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "own"), rel=1e-6)
    again = [word.replace("3", "4") for word in theirs]
    finish(start(tmp_path, *again, "--resume-from", "ck"))
    assert len(losses(tmp_path)) == 4


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a run that ends well."""
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err


def losses(folder: Path) -> list[float]:
    """The losses of the run in a folder."""
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [row["loss"] for row in map(json.loads, text.splitlines()) if "loss" in row]
