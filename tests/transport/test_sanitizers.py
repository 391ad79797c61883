"""The C++ side under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.transport.kinds import build_fake_verbs

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
DEVICES = ["fake0", "fake0", "2"]
MANY = "25000"  # on each of four channels
RDMA = ["rdma", "2000", "65536", *DEVICES]
LARGE_TCP = ["tcp", "10", str(5 << 20)]  # striped, and memory is given away
LARGE_RDMA = ["rdma", "10", str(6 << 20), *DEVICES]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build with")


def build(program: str, sanitizers: str, folder: Path, *, patience: float = PATIENCE) -> Path:
    """A program of csrc/tests, with sanitizers or with none; skips where their libraries are
    missing.
    """
    binary = folder / program
    sources = [REPOSITORY / "csrc/tests" / f"{program}.cc"]
    for room in ("base", "transport"):
        sources += sorted((REPOSITORY / "csrc" / room).glob("*.cc"))
    command = ["g++", "-std=c++17", "-g", "-pthread"]
    command += ["-O1", f"-fsanitize={sanitizers}"] if sanitizers else ["-O2"]
    command += ["-fno-sanitize-recover=all"] if "undefined" in sanitizers else []
    command += [f"-I{REPOSITORY / 'csrc'}", *map(str, sources), "-ldl", "-o", str(binary)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the {sanitizers} runtime is not installed")
    assert built.returncode == 0, built.stderr[-2000:]
    return binary


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_random_traffic_is_clean(sanitizers: str, tmp_path: Path) -> None:
    binary = build("stress", sanitizers, tmp_path)
    build_fake_verbs(tmp_path)
    for words in (["shm", MANY], ["tcp", MANY], LARGE_TCP, RDMA, LARGE_RDMA):
        ran = subprocess.run(
            [str(binary), *words],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
