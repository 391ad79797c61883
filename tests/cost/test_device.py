"""Reading a GPU's name and limits from ``nvidia-smi``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.dpp_train.cost.device import find_gpus, find_machine, gpu_device


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = find_machine()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.num_gpus == 1
    assert machine.device.name.endswith(name)
    assert machine.device.memory_bytes == (memory_bytes or host)


@pytest.mark.parametrize(
    ("shown", "number"), [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("2, -1", 1)]
)
def test_gpus_that_are_hidden_do_not_count(
    shown: str | None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "echo NVIDIA H200, 143771\n" * 4)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert find_machine().num_gpus == number
    assert (find_gpus() is not None) == (number > 0)


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA A10", "A10"), ("NVIDIA L40S", "L40S"), ("NVIDIA A100-SXM4-80GB", "A100"),
     ("NVIDIA A10G", None), ("NVIDIA GB10", None), ("NVIDIA T400", None)],
)  # fmt: skip
def test_a_gpu_whose_name_goes_on_is_another(name: str, known: str | None) -> None:
    found = gpu_device(name, 2**30).source
    assert found == (
        f"72 % of the {known}'s peak" if known else "a guess: not in the table of GPUs"
    )
