"""A file system that runs full soon. Needs the right to mount a tmpfs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path | None]:
    """A file system of this size in ``folder``; None where none can be mounted."""
    path = folder / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """:func:`mounted`; skips the test where that cannot be."""
    with mounted(folder, num_bytes) as path:
        if path is None:
            pytest.skip("needs the right to mount a tmpfs")
        yield path
