"""The memory that control groups, a container's limit, leave to slots."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp.transport.native import load_native
from tests.conftest import REPOSITORY

MIB = 1 << 20
PATIENCE = 60.0
SECOND = ("", "memory.max", "memory.current", "")
FIRST = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def room(tmp_path: Path, line: str) -> tuple[int, str] | None:
    (tmp_path / "groups").write_text(f"3:cpu:/elsewhere\n{line}\n")
    found: tuple[int, str] | None = load_native().memory_room(
        str(tmp_path / "groups"), str(tmp_path)
    )
    return found


def group(folder: Path, version: tuple[str, ...], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _, limit_file, used_file, prefix = version
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon {used}\n{prefix}inactive_file {cached}\n{prefix}active_file 0\n"
    )


@pytest.mark.parametrize(
    ("version", "line"), [(SECOND, "0::/a/b"), (FIRST, "4:cpuset,memory:/a/b")], ids=["v2", "v1"]
)
def test_the_tightest_limit_of_all_parents_counts_without_cached_files(
    version: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    root = tmp_path / version[0]
    group(root / "a/b", version, "max" if version is SECOND else str((1 << 63) - 4096), 10 * MIB)
    group(root / "a", version, str(100 * MIB), 90 * MIB, cached=30 * MIB)
    found = room(tmp_path, line)
    assert found is not None and found[0] == 40 * MIB
    assert f"group {root}/a is {100 * MIB} bytes, of which {60 * MIB} are used" in found[1]


def test_in_a_container_the_path_may_be_the_hosts(tmp_path: Path) -> None:
    group(tmp_path, SECOND, str(64 * MIB), 80 * MIB)
    found = room(tmp_path, "0::/docker/0123")
    assert found is not None and found[0] == 0


def test_without_a_limit_or_readable_files_there_is_room(tmp_path: Path) -> None:
    assert room(tmp_path, "0::/none") is None
    group(tmp_path, SECOND, "much", 0)
    assert room(tmp_path, "0::/") is None
    assert room(tmp_path, "nonsense") is None
    assert load_native().memory_room("/none", "/none") is None


ASKS = """
import socket, sys
from tests.transport import raw
native = raw.load(sys.argv[1])
raw.start(native, 1, [raw.channel(0, 256 << 20)], [socket.socketpair()[0] for _ in range(2)])
"""


@contextlib.contextmanager
def limited(mebibytes: int) -> Iterator[Path]:
    """A control group of this machine with a limit; skips where none can be made."""
    first = Path("/sys/fs/cgroup/memory")
    folder = (first if first.is_dir() else first.parent) / f"dpp-test-{os.getpid()}"
    name = FIRST[1] if first.is_dir() else SECOND[1]
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (folder / name).write_text(str(mebibytes * MIB))
        except OSError as error:
            pytest.skip(f"no limit can be set: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_slots_beyond_a_real_limit_are_refused_before_they_are_allocated() -> None:
    with limited(256) as folder:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh",
             sys.executable, "-c", ASKS, load_native().__file__],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "SetupError" in done.stderr
    assert f"the limit of control group {folder} is {256 * MIB} bytes" in done.stderr
    assert "fewer --dpp-slots need less; docker: --memory" in done.stderr
