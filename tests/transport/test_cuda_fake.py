"""The GPU kinds without a GPU: everything but the driver, over csrc/tests/fake_cuda.cc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transport.kinds import build_fake_verbs

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("fake_cuda_worker.py")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake libcuda.so.1 and the fake libibverbs.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    source = REPOSITORY / "csrc" / "tests" / "fake_cuda.cc"
    target = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    build_fake_verbs(folder)
    return folder


def run(driver: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHONPATH": str(REPOSITORY), "LD_LIBRARY_PATH": str(driver), **environment}
    return subprocess.run(
        [sys.executable, str(WORKER), *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("cuda_ipc",),
        ("cuda_ipc", "checksum"),
        ("staged", "checksum"),
        ("rdma", "checksum"),
    ],
    ids=" ".join,
)
def test_random_messages_both_ways(driver, arguments):
    done = run(driver, *arguments)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


def test_slots_travel_as_descriptors_where_handles_are_refused(driver):
    done = run(driver, "cuda_ipc", FAKE_CUDA_REFUSE_IPC="1")
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


def test_a_link_that_loses_what_is_written_is_refused(driver):
    done = run(driver, "cuda_ipc", FAKE_CUDA_CORRUPT="1")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("TransportUnavailable")
    assert "arrived wrong" in done.stdout and "--dpp-transport staged" in done.stdout
