"""The memory that control groups, a container's limit, leave to slots."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp.transport.native import load_native
from tests.conftest import REPOSITORY

MIB = 1 << 20
PATIENCE = 60.0
SECOND = ("", "memory.max", "memory.current", "", "memory.swap.max")
FIRST = (
    *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "memory.memsw.limit_in_bytes",
)


def room(tmp_path: Path, line: str, free_swap: int = 0) -> tuple[int, str] | None:
    (tmp_path / "groups").write_text(f"3:cpu:/elsewhere\n{line}\n")
    found: tuple[int, str] | None = load_native().memory_room(
        str(tmp_path / "groups"), str(tmp_path), free_swap
    )
    return found


def group(folder: Path, version: tuple[str, ...], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, prefix = version[1:4]
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
    assert load_native().memory_room("/none", "/none", 0) is None


def test_caches_of_the_kernel_do_not_count_as_used(tmp_path: Path) -> None:
    group(tmp_path, SECOND, str(100 * MIB), 90 * MIB, cached=10 * MIB)
    with (tmp_path / "memory.stat").open("a") as file:
        file.write(f"slab_reclaimable {50 * MIB}\nslab_unreclaimable {20 * MIB}\n")
    found = room(tmp_path, "0::/")
    assert found is not None and found[0] == 70 * MIB


@pytest.mark.parametrize(
    ("limit", "used", "parents_limit", "free", "left"),
    [
        ("max", 0, "max", 30 * MIB, 40 * MIB),  # this machine's
        ("max", 0, "max", 0, 10 * MIB),
        (str(50 * MIB), 45 * MIB, "max", 30 * MIB, 15 * MIB),
        ("0", 0, "max", 30 * MIB, 10 * MIB),
        ("max", 0, "0", 30 * MIB, 10 * MIB),
    ],
)
def test_free_swap_is_room_too(
    limit: str, used: int, parents_limit: str, free: int, left: int, tmp_path: Path
) -> None:
    group(tmp_path / "a", SECOND, "max", 0)
    group(tmp_path / "a/b", SECOND, str(100 * MIB), 90 * MIB)
    for folder, most, swapped in (("a", parents_limit, 0), ("a/b", limit, used)):
        (tmp_path / folder / "memory.swap.max").write_text(f"{most}\n")
        (tmp_path / folder / "memory.swap.current").write_text(f"{swapped}\n")
    found = room(tmp_path, "0::/a/b", free)
    assert found is not None and found[0] == left
    assert found[1].endswith(f"and {left - 10 * MIB} bytes of swap are free")


ASKS = """
import socket, sys
from tests.transport import raw
native = raw.load(sys.argv[1])
slots = [raw.channel(0, int(sys.argv[2]))]
resident = lambda: int(open("/proc/self/statm").read().split()[1])
before = resident()
transport = raw.start(native, 1, slots, [socket.socketpair()[0] for _ in range(2)])
print(resident() - before)
transport.close()
"""
ELSEWHERE = """
#include <cstdlib>
#include <cstring>
#include <string>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>
extern "C" int open(const char* path, int flags, ...) {
  std::string found = path;
  if (found == "/proc/self/cgroup" || found.rfind("/sys/fs/cgroup/", 0) == 0)
    found = std::getenv("GROUPS_BELOW") + found;
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, found.c_str(), flags, 0666));
}
"""


def build(source: str, folder: Path) -> Path:
    """A library whose calls stand before those of the C library."""
    library = folder / "calls.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=PATIENCE)
    return library


def ask(slot_bytes: int, *before: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Open a transport with two slots in a process of its own."""
    return subprocess.run(
        [*before, sys.executable, "-c", ASKS, load_native().__file__, str(slot_bytes)],
        cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


BEFORE_LINUX_5_14 = """
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
extern "C" int madvise(void* memory, size_t bytes, int advice) noexcept {
  return advice == 23 ? (errno = EINVAL, -1) : static_cast<int>(
      syscall(SYS_madvise, memory, bytes, advice));
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the other madvise with")
@pytest.mark.parametrize("known", [True, False])
def test_the_pages_of_tcp_slots_exist_from_the_start(known: bool, tmp_path: Path) -> None:
    library = build(BEFORE_LINUX_5_14, tmp_path)
    done = ask(8 * MIB, **({} if known else {"LD_PRELOAD": str(library)}))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * resource.getpagesize() >= 16 * MIB  # two slots


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the other open with")
def test_a_full_group_refuses_slots_but_no_small_block(tmp_path: Path) -> None:
    library = build(ELSEWHERE, tmp_path)
    full = tmp_path / "sys/fs/cgroup"
    group(full, SECOND, str(64 * MIB), 64 * MIB)
    (full / SECOND[4]).write_text("0")
    (full / "memory.swap.current").write_text("0")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    settings = {"LD_PRELOAD": str(library), "GROUPS_BELOW": str(tmp_path)}
    done = ask(MIB, **settings)
    assert done.returncode == 1 and "only 0 bytes are left, as the limit of" in done.stderr
    done = ask(MIB // 4, **settings)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def limited(mebibytes: int) -> Iterator[Path]:
    """A control group of this machine with a limit; skips where none can be made."""
    first = Path("/sys/fs/cgroup/memory")
    folder = (first if first.is_dir() else first.parent) / f"dpp-test-{os.getpid()}"
    version = FIRST if first.is_dir() else SECOND
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (folder / version[1]).write_text(str(mebibytes * MIB))
        except OSError as error:
            pytest.skip(f"no limit can be set: {error}")
        if (folder / version[4]).exists():  # no swap
            (folder / version[4]).write_text(str(mebibytes * MIB) if version is FIRST else "0")
        yield folder
    finally:
        folder.rmdir()


def test_slots_beyond_a_real_limit_are_refused_before_they_are_allocated() -> None:
    with limited(256) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        done = ask(256 * MIB, "sh", "-c", enter, "sh")
    assert done.returncode == 1, done.stderr
    assert "SetupError" in done.stderr
    assert f"the limit of control group {folder} is {256 * MIB} bytes" in done.stderr
    assert "(lower DppConfig(slots=...); docker's option memory)" in done.stderr
