"""Reading a GPU's name and limits from ``nvidia-smi``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.dpp.plan.device import find_machine


@pytest.mark.parametrize(
    ("line", "name", "memory_bytes"),
    [
        ("NVIDIA H200, 143771", "NVIDIA H200", 143771 * 2**20),
        ("NVIDIA H100 80GB HBM3, [Insufficient Permissions]", "a whole H100's", 80 * 2**30),
        ("NVIDIA GB10, [N/A]", "NVIDIA GB10, its memory taken for the host's", None),
    ],
)
def test_a_gpu_without_a_size_is_no_traceback(
    line: str,
    name: str,
    memory_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integrated GPUs have no memory of their own, and MIG slices may not report theirs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho 'warning: a line, of nothing'\necho '{line}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = find_machine(env={})
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.num_gpus == 1
    assert machine.device.name.endswith(name)
    assert machine.device.memory_bytes == (memory_bytes or host)
