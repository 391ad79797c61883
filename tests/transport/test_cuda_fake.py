"""The GPU kinds without a GPU: everything but the driver, over csrc/tests/fake_cuda.cc."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.kinds import build_fake_cuda, build_fake_verbs

NUMBERS = itertools.count()
REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("fake_cuda_worker.py")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake libcuda.so.1 and the fake libibverbs.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    build_fake_cuda(folder)
    build_fake_verbs(folder)
    return folder


@pytest.fixture(scope="module")
def worker(driver: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of fake_cuda_worker.py, which forks for what it is asked."""
    settings = {"PYTHONPATH": str(REPOSITORY), "LD_LIBRARY_PATH": str(driver)}
    with subprocess.Popen(
        [sys.executable, str(WORKER)], env=os.environ | settings, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def run(worker: subprocess.Popen[str], *cases: str, **environment: str) -> list[str]:
    """Runs cases of fake_cuda_worker.py in one process; returns the output of each."""
    number = next(NUMBERS)
    worker.stdin.write(json.dumps([cases, environment, number]) + "\n")
    worker.stdin.flush()
    lines = []
    while not (lines and re.fullmatch(rf"exit -?\d+ of {number}\n", lines[-1])):
        lines.append(worker.stdout.readline())
        assert lines[-1], "the worker has ended"
        if lines[-1] == f"begin {number}\n":
            lines.clear()  # what a test that ran out of time did not read
    assert lines.pop() == f"exit 0 of {number}\n", lines
    said = "".join(lines).split("case ")[1:]
    assert len(said) == len(cases), lines
    return said


BUSY = {"FAKE_CUDA_SLOW": "100000000", "FAKE_CUDA_BUSY": "20"}
DIRECT = "gpudirect=on,on direct=dmabuf+flush late-gpu-writes"


@pytest.mark.parametrize(
    ("cases", "settings", "end", "says"),
    [
        # Random messages both ways; slots travel as descriptors where handles are refused.
        (("cuda_ipc", "cuda_ipc checksum", "staged checksum", "rdma checksum"), {}, "ok", ()),
        (("cuda_ipc",), {"FAKE_CUDA_REFUSE_IPC": "1"}, "ok", ()),
        # What is on its way may be taken, unless streams cannot write values.
        (("cuda_ipc ahead",), {"FAKE_CUDA_SLOW": "3000"}, "ok", ()),
        (("cuda_ipc not-ahead",), {"FAKE_CUDA_SLOW": "3000", "FAKE_CUDA_NO_VALUES": "1"}, "ok",
         ("nothing is launched ahead: cuStreamWriteValue32 on Fake GPU",)),
        # A stream that waits for a dead sender is let go.
        (("cuda_ipc let-go",), {"FAKE_CUDA_SLOW": "1000000", "FAKE_CUDA_SILENT": "1"}, "ok",
         ("PeerDead", "asked to")),
        (("cuda_ipc",), {"FAKE_CUDA_CORRUPT": "1"}, "refused",
         ("TransportUnavailable", "arrived wrong", "DppConfig(transport='staged')")),
        (("rdma one-wait",), {}, "ok", ()),
        # Memory that a stream of ours uses is not given up, and a close is bounded.
        *(((f"{kind} close-busy",), BUSY, "ok", ())
          for kind in ("cuda_ipc", "staged", "rdma", "rdma direct=dmabuf+ordered")),
        (("cuda_ipc marks",), {"FAKE_CUDA_SLOW_COPIES": "500"}, "ok", ()),
        (("cuda_ipc close-stuck",), {"FAKE_CUDA_SLOW": "1000000000"}, "ok", ()),
        # GPUDirect waits for single bytes, and opens only slots.
        ((f"rdma one-by-one {DIRECT}", f"rdma open-slots {DIRECT}"), {}, "ok", ()),
    ],
)  # fmt: skip
def test_what_a_gpu_of_a_driver_that_we_made_shows(worker, cases, settings, end, says):
    for said in run(worker, *cases, **settings):
        assert said.endswith(f"\n{end}\n"), said
        for text in says:
            assert text in said, said


def test_the_card_reads_and_writes_gpu_memory(worker):
    ways = {
        "direct=dmabuf+ordered": "dma-buf, the GPU orders writes",
        "direct=dmabuf+flush late-gpu-writes": "dma-buf, writes are waited for",
        "direct=peermem+flush peermem late-gpu-writes": "nvidia-peermem, writes are waited for",
        "direct=dmabuf+peermem+ordered no-dmabuf peermem": "nvidia-peermem, the GPU orders writes",
    }
    cases = [f"rdma checksum gpudirect=on,on {words}" for words in ways]
    for said, way in zip(run(worker, *cases), ways.values(), strict=True):
        assert said.endswith("\nok\n") and said.count(f"GPUDirect ({way})") == 2, said


def test_one_side_with_gpudirect_and_one_without(worker):
    cases = [f"rdma checksum direct=dmabuf+ordered gpudirect={x}" for x in ("on,off", "off,on")]
    for said in run(worker, *cases):
        assert said.endswith("\nok\n") and "GPUDirect (dma-buf" in said, said
        assert "staged in the host's memory, no GPUDirect: DppConfig(gpudirect='off')" in said


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("direct=none", ["neither orders an RDMA card's writes nor can wait for them"]),
        ("direct=ordered",
         ["dma-buf: the GPU's driver has none", "nvidia-peermem: the GPU does not support it"]),
        ("direct=dmabuf+peermem+ordered no-dmabuf",
         ["ibv_reg_dmabuf_mr: Operation not supported", "(modprobe nvidia-peermem)"]),
    ],
)  # fmt: skip
def test_what_gpudirect_lacks_is_said_and_an_error_only_when_it_is_asked_for(
    worker, words, reasons
):
    staged, asked = run(worker, f"rdma {words}", f"rdma gpudirect=on,on {words}")
    assert staged.endswith("\nok\n"), staged
    assert "staged in the host's memory, no GPUDirect: " in staged
    assert asked.endswith("\nrefused\n"), asked
    assert "TransportUnavailable DppConfig(gpudirect='on'): " in asked
    for reason in reasons:
        assert staged.count(reason) == 2 and reason in asked


# The GPU says that it orders writes, so nothing waits for them.
@pytest.mark.parametrize("fault", ["lose-gpu-writes", "late-gpu-writes"])
def test_gpu_memory_that_does_not_show_what_was_written_is_left_to_the_host(worker, fault):
    words = ("", " gpudirect=auto,off", " gpudirect=on,on", " gpudirect=auto,on")
    here, half, asked, by_one = run(
        worker, *(f"rdma direct=dmabuf+ordered {fault}{more}" for more in words)
    )
    for said in (here, half):
        assert said.endswith("\nok\n"), said
        assert said.count("staged in the host's memory: the GPUDirect link with rank") == 2
        assert "arrived wrong" in said
    for said in (asked, by_one):
        assert said.endswith("\nrefused\n"), said
        assert "TransportUnavailable DppConfig(gpudirect='on'): " in said, said
        assert "arrived wrong" in said and "DppConfig(gpudirect='off')" in said


def test_a_path_that_carries_nothing_is_not_blamed_on_gpudirect(worker):
    words = ("", " gpudirect=on,on")
    for said in run(worker, *(f"rdma direct=dmabuf+ordered lose-writes{more}" for more in words)):
        asked = "gpudirect='on'" if "on,on" in said else "transport='rdma'"
        assert said.count(f"DppConfig({asked}): rank ") == 2 and said.endswith("\nrefused\n"), said
        assert "over fake0 port 1 has not completed after 1.5 s" in said and "UDP" in said, said
        assert "IOMMU" not in said


def test_the_hosts_memory_in_the_place_of_gpudirect_is_tested_too(worker):
    # Each end writes four pages and two payloads; then the links are set up again.
    (said,) = run(
        worker, "rdma direct=dmabuf+ordered lose-gpu-writes spare-writes=12 lose-writes=1000"
    )
    assert said.endswith("\nrefused\n"), said
    assert said.count("DppConfig(transport='rdma'): rank ") == 2 and "not completed" in said, said


@pytest.mark.parametrize(
    ("gpu", "state", "text"),
    [
        ("dmabuf flush", "ok", "fake0: dma-buf, writes are waited for"),
        ("peermem flush", "note", "(modprobe nvidia-peermem)"),
    ],
)
def test_the_doctor_says_what_gpudirect_finds(driver, gpu, state, text):
    settings = {"PYTHONPATH": str(REPOSITORY), "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from megatron.dpp.doctor import probe_gpu_direct as g; print(tuple(g()))",
        ],
        env=os.environ | settings | {"FAKE_CUDA_DIRECT": gpu},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert f"('GPUDirect', '{state}', " in done.stdout, done.stdout + done.stderr
    assert text in done.stdout
