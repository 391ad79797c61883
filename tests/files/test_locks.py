"""Two runs that write one directory: the second is refused and told who holds it."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.files import locks
from megatron.dpp.trace import TraceLayout, open_recorder

_HOLD = """
import sys, time
from megatron.dpp.files.locks import lock_directory
lock = lock_directory(sys.argv[1], "--save")
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_of_two_is_refused_in_a_second_and_told_who_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # seconds that the second one has waited
    monkeypatch.setattr(locks, "time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s), time=time.time,
    ))  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    named = f"--save {tmp_path}: process {first.pid} on host {socket.gethostname()} writes there"
    try:
        for turn in range(1, 21):
            with pytest.raises(DataError, match=re.escape(named)):
                locks.lock_directory(tmp_path, "--save")
            assert now[0] < turn
    finally:
        first.kill()
        first.communicate()
    locks.lock_directory(tmp_path, "--save").close()  # gone with its process
    assert not (tmp_path / locks.LOCK_NAME).read_bytes()


def test_the_processes_of_a_killed_run_have_a_moment_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, waited = locks.lock_directory(tmp_path, "--save"), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > 0.1:
            lock.close()

    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=sleep, time=time.time)
    monkeypatch.setattr(locks, "time", clock)
    locks.lock_directory(tmp_path, "--save").close()
    assert 0.1 < sum(waited) < 0.2


def test_a_trace_file_has_one_writer(tmp_path: Path) -> None:
    layout = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)
    with open_recorder(tmp_path, rank=0, layout=layout):
        before = layout.path(tmp_path).read_bytes()
        with pytest.raises(DataError, match=rf"process {os.getpid()} on host .* writes there"):
            open_recorder(tmp_path, rank=0, layout=layout)
        assert layout.path(tmp_path).read_bytes() == before
    with open_recorder(tmp_path, rank=0, layout=layout):
        pass


@pytest.mark.parametrize("user", ["own", "another", "root"])
def test_a_lock_is_for_its_user_alone(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = tmp_path / locks.LOCK_NAME, os.getuid()
    path.touch(mode=0o644)
    if user == "another":
        monkeypatch.setattr(os, "geteuid", lambda: number + 1)
        with pytest.raises(DataError, match=rf"--save .*\.lock: belongs to user number {number}"):
            locks.lock_directory(tmp_path, "--save")
        return
    if user == "root":  # over NFS its files are nobody's
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with locks.lock_directory(tmp_path, "--save"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_attempt_on_a_full_disk_or_a_name_of_no_file_leaves_nothing(tmp_path: Path) -> None:
    """It left the directory and an empty lock, and a NUL was a traceback."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for name in ("new", "old"):
            with pytest.raises(DataError, match=f"--save {tmp_path}/{name}: File too large"):
                locks.lock_directory(tmp_path / name, "--save")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(DataError, match=r"--save .*is no name of a file"):
        locks.lock_directory(tmp_path / "a\0b", "--save")
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_what_a_killed_process_left_of_its_scratch_goes_with_the_next(tmp_path: Path) -> None:
    """Another's, whose process lives or whose host is another one, stays."""
    for name, host, process in (
        ("dead", socket.gethostname(), 2**22 + 1), ("living", socket.gethostname(), os.getpid()),
        ("far", "far-away", 1),
    ):  # fmt: skip
        folder = tmp_path / f".new.{name}"
        folder.mkdir()
        (folder / locks.LOCK_NAME).write_text(f'{{"host": "{host}", "process": {process}}}\n')
    with locks.scratch_directory(tmp_path, ".new.") as own:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {own.name, ".new.living", ".new.far"}
    assert not own.exists()


def test_a_released_lock_is_free_though_a_child_has_inherited_it(tmp_path: Path) -> None:
    held = locks.lock_directory(tmp_path, "here")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        held.close()
        locks.lock_directory(tmp_path, "here").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
