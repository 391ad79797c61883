"""The memory that control groups, a container's limit, leave to slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.transport.native import load_native

MIB = 1 << 20
PATIENCE = 60.0
SECOND = ("", "memory.max", "memory.current", "")
FIRST = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def room(tmp_path: Path, line: str, free_swap: int = 0) -> tuple[int, str] | None:
    (tmp_path / "groups").write_text(f"3:cpu:/elsewhere\n{line}\n")
    found: tuple[int, str] | None = load_native().memory_room(
        str(tmp_path / "groups"), str(tmp_path), free_swap
    )
    return found


def group(folder: Path, version: tuple[str, ...], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, prefix = version[1:]
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
