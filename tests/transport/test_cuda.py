"""The kinds that serve GPUs, between two processes: on one GPU, or on two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launcher import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("cuda_worker.py")
SCENARIOS = (
    "any_payload",
    "late_producer",
    "late_consumer",
    "other_streams",
    "taken_ahead",
)
KINDS = ("cuda_ipc", "staged")


def exchange(
    kind, devices=("cuda:0", "cuda:0"), names=SCENARIOS, settings=None, visible=None, dies=None
):
    """Run both processes to their end; fail with what they printed. Rank ``dies`` is killed."""
    port = free_port()
    processes = []
    for rank, device in enumerate(devices):
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | (settings or {})
        if visible:
            environment["CUDA_VISIBLE_DEVICES"] = visible[rank]
        command = [sys.executable, str(WORKER), kind, str(rank), str(port), device, *names]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if rank == dies:
            assert process.returncode == -signal.SIGKILL, output
            continue
        assert process.returncode == 0 and output.rstrip().endswith("ok"), "\n".join(outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_on_one_gpu(kind):
    exchange(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_one_hardware_queue(kind):
    """With this setting all streams share one queue; Megatron's scripts use it."""
    exchange(kind, settings={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_expandable_segments_and_checksums(kind):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    exchange(kind, names=("any_payload", "late_producer", "checksum"), settings=settings)


@pytest.mark.gpu
def test_exported_memory_where_handles_are_refused():
    exchange("cuda_ipc", names=(*SCENARIOS, "refuse"))


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("connections", ["1", "8"])
def test_two_gpus(kind, connections):
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    exchange(kind, devices=("cuda:0", "cuda:1"), settings=settings)


@pytest.mark.multigpu
def test_a_gpu_that_waits_for_a_dead_rank_is_let_go():
    exchange("cuda_ipc", devices=("cuda:0", "cuda:1"), names=("sender_dies",), dies=0)


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", KINDS)
def test_each_process_sees_one_gpu(kind):
    exchange(kind, visible=("0", "1"))
