"""Processes beside a reader: their order, and their end where one is killed or stopped."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.pool import in_order
from tests.nodes import REPOSITORY


def double(number: int) -> tuple[int, int]:
    return os.getpid(), 2 * number


def get_a_signal(number: int) -> int:
    """In place of the second batch."""
    if number < 0:
        os.kill(os.getpid(), -number)
    return number


def test_results_come_in_order_from_other_processes() -> None:
    for _ in range(2):
        found = list(in_order(2, double, range(40)))
        assert [(number, result[1]) for number, result in found] == [(i, 2 * i) for i in range(40)]
        assert os.getpid() not in {result[0] for _, result in found}


def test_a_killed_worker_is_named() -> None:
    said = r"a worker process died \(process \d+ ended by SIGSEGV; .*: try fewer than --workers 2"
    with pytest.raises(DataError, match=said):
        list(in_order(2, get_a_signal, [1, -signal.SIGSEGV, 3]))


def test_a_stopped_worker_is_named_and_ended() -> None:
    """Its result was waited for without end, and so was its end after SIGTERM."""
    batches = [1, -signal.SIGSTOP, 3]
    with pytest.raises(DataError, match=r"stopped for 1 s \(SIGSTOP, a debugger\): process \d+ \("):
        list(in_order(2, get_a_signal, batches, patience=1.0))


def test_processes_that_cannot_start_are_an_error_that_says_why() -> None:
    """A file system that was full or read-only was named by nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    try:
        with pytest.raises(
            DataError, match=r"--workers 2: its processes cannot start \(\[Errno 24"
        ):
            list(in_order(2, double, range(2)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


_KILLED = """
import os, signal
from megatron.dpp_train.data.pool import in_order
from tests.data.test_pool import double
for (number, (pid, _)) in in_order(2, double, range(100)):
    if number == 5:
        print(pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_reader_leaves_nothing(tmp_path: Path) -> None:
    """`pymp-*` in the temporary directory stayed for ever."""
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED], cwd=REPOSITORY, capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    psutil.wait_procs([each for each in psutil.process_iter() if each.pid == int(ended.stdout)], 60)
    assert not psutil.pid_exists(int(ended.stdout))
    assert not list(tmp_path.iterdir())
