"""Processes that are stopped for too long are ended by name: nobody else waits with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp_train.launch.stopped import SECONDS, StoppedWatch, setting
from tests.nodes import REPOSITORY
from tests.test_culprits import COPIES

PATIENCE = 120
_STOPS = """
import os, signal, sys
child = os.fork() if "fork" in sys.argv else 0
if child:
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
elif "ends well" not in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def _rank(rank: int, world_size: int, *words: str) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return subprocess.Popen([sys.executable, "-c", _STOPS, *words], env={**os.environ, **place})


def test_a_rank_that_is_stopped_behind_its_last_iteration_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its peers had ended well, and torchrun waited for it without end and without a word."""
    monkeypatch.setenv(SECONDS, "0.5")
    ranks = [_rank(0, 2, "ends well"), _rank(1, 2)]
    try:
        with StoppedWatch():
            assert [rank.wait(PATIENCE) for rank in ranks] == [0, -signal.SIGKILL]
    finally:
        ranks[1].kill()
    said = f"error: process {ranks[1].pid} (python) of rank 1 was stopped (SIGSTOP or a debugger)"
    assert f"{said} for 0.5 s (DPP_STOPPED_SECONDS): it is ended" in capfd.readouterr().err


def test_the_only_rank_may_be_stopped_and_its_child_may_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECONDS, "0.2")
    rank, parent = _rank(0, 1), _rank(0, 1, "fork")
    try:
        with StoppedWatch():
            assert parent.wait(PATIENCE) == 0
            assert rank.poll() is None
    finally:
        rank.kill()
        parent.kill()
        rank.wait()
    assert capfd.readouterr().err.count(" of rank 0 was stopped") == 1


def test_the_time_is_that_of_collectives_and_some_more() -> None:
    assert setting(10) == {SECONDS: "630"}


_STOPPED_COPIER = """
import os, signal, sys
from megatron.dpp_train.launch.log_copy import LogWatch
with LogWatch():
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    print("last", flush=True)
"""


def test_a_stopped_process_that_copies_the_output_keeps_no_line_of_it(tmp_path: Path) -> None:
    """The last lines were lost, and it held the lock of the run's directory."""
    log = tmp_path / "train.log"
    done = subprocess.run(
        [sys.executable, "-c", COPIES, str(log), _STOPPED_COPIER], capture_output=True, text=True,
        cwd=REPOSITORY, timeout=PATIENCE,
    )  # fmt: skip
    assert done.stdout == "last\n" and "was ended by SIGKILL; torchrun goes on" in done.stderr
    assert log.read_text() == "last\n"


@pytest.mark.slow
def test_torchrun_ends(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    script.write_text(f"import os, signal\nif os.environ['RANK'] == '1':\n    {stop}\n")
    words = ["--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.dpp_train.launch.torchrun", *words], cwd=REPOSITORY,
        env={**os.environ, SECONDS: "1"}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert "of rank 1 was stopped" in first and "ended first, by SIGKILL: see above why" in last
