"""SIGTERM to whole process groups, as torchrun sends it: ``--exit-signal-handler`` saves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from megatron.dpp_train.checkpoint import files as files
from tests.loop.several import FLAGS, corpus
from tests.nodes import running
from tests.runtime.launcher import REPOSITORY, Rank, start, wait


def _start(folder: Path, more: str = "") -> Rank:
    """A rank with workers of its loaders."""
    flags = (
        f"{FLAGS} {corpus()} --data-cache-path {folder}.cache --num-workers 1 "
        f"--train-iters 100000 --save {folder} --save-interval 2 --exit-signal-handler "
        f"--metrics-file {folder}.jsonl {more}"
    )
    return start(REPOSITORY / "pretrain_gpt.py", 1, flags.split())[0]


def _children(rank: Rank, metrics: Path, least: int) -> list[psutil.Process]:
    """Waits until the rank has saved once; returns its child processes, at least so many."""
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert rank.poll() is None and time.monotonic() < deadline, wait([rank], timeout=0)
        time.sleep(0.02)
    children = psutil.Process(rank.pid).children(recursive=True)
    assert len(children) >= least
    return children


def test_a_run_with_workers_saves_again_and_they_end_with_it(tmp_path: Path) -> None:
    """The last save of the stopped one needs megatron-core's manager, which gets the signal too."""
    stopped, killed = _start(tmp_path / "stopped", "--async-save"), _start(tmp_path / "killed")
    try:
        helpers = _children(stopped, tmp_path / "stopped.jsonl", 3)
        orphans = _children(killed, tmp_path / "killed.jsonl", 1)
        killed.kill()
        os.killpg(killed.pid, signal.SIGTERM)  # its workers do not heed it
        os.killpg(stopped.pid, signal.SIGTERM)
        (finished,) = wait([stopped], timeout=150)
        assert finished.returncode == 0, finished.output[-4000:]
        last = int((tmp_path / "stopped" / files.TRACKER).read_text())
        assert f"[exiting program at iteration {last}] a rank received SIGTERM" in finished.output
        for left in (helpers, orphans):  # some notice only then that their rank has ended
            psutil.wait_procs(left, timeout=60)
            assert not running(left)
    finally:
        wait([stopped, killed], timeout=0)  # kills the sessions
