"""Processes beside a reader: their order, and their end where one is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.pool import in_order
from tests.nodes import REPOSITORY


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory that leaves room for the path of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def double(number: int) -> tuple[int, int]:
    return os.getpid(), 2 * number


def get_a_signal(number: int) -> int:
    """In place of the second batch."""
    if number < 0:
        os.kill(os.getpid(), -number)
    return number


def test_results_come_in_order_from_processes_that_leave_nothing(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    for _ in range(2):
        found = list(in_order(2, "math", double, range(40)))
        assert [(number, result[1]) for number, result in found] == [(i, 2 * i) for i in range(40)]
        assert os.getpid() not in {result[0] for _, result in found}
        assert not list(short.iterdir())


def test_a_killed_worker_is_named() -> None:
    said = r"a worker process died \(process \d+ ended by SIGSEGV; .*: try fewer than --workers 2"
    with pytest.raises(DataError, match=said):
        list(in_order(2, "math", get_a_signal, [1, -signal.SIGSEGV, 3]))


def test_a_stopped_worker_is_named_and_ended() -> None:
    """Its result was waited for without end, and so was its end after SIGTERM."""
    batches = [1, -signal.SIGSTOP, 3]
    with pytest.raises(DataError, match=r"stopped for 1 s \(SIGSTOP, a debugger\): process \d+ \("):
        list(in_order(2, "math", get_a_signal, batches, patience=1.0))


def test_processes_that_cannot_start_are_an_error_that_says_why(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that was full or read-only was named by nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(short / "x"))
    with pytest.raises(DataError, match=r"--workers 2: its processes cannot start \(\[Errno 2\]"):
        list(in_order(2, "math", double, range(2)))


def test_a_long_name_of_the_temporary_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was `AF_UNIX path too long`."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert len(list(in_order(2, "math", double, range(2)))) == 2


_KILLED = """
import os, signal, sys, tempfile
from megatron.dpp_train.data.pool import in_order
from tests.data.test_pool import double
for number, _ in in_order(2, "math", double, range(100)):
    if number == 5 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_reader_goes_at_the_next_start(short: Path) -> None:
    """`pymp-*` in the temporary directory stayed for ever."""
    for how, code in (("killed", -signal.SIGKILL), ("whole", 0)):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, how], cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(short)},
        )  # fmt: skip
        assert process.wait(120) == code
        assert bool(list(short.iterdir())) == (how == "killed")
