"""The C++ side under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.kinds import build_fake_verbs

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
DEVICES = ["fake0", "fake0", "2"]
MANY = "25000"  # on each of four channels
RDMA = ["rdma", "2000", "65536", *DEVICES]
HOSTILE = "20000"  # inputs of each sort
LARGE_TCP = ["tcp", "10", str(5 << 20)]  # striped, and memory is given away
LARGE_RDMA = ["rdma", "10", str(6 << 20), *DEVICES]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build with")


def flags_of(sanitizers: str) -> list[str]:
    """Of the compiler, for sanitizers or for none."""
    flags = ["-std=c++17", "-g", "-pthread", f"-I{REPOSITORY / 'csrc'}"]
    flags += ["-O1", f"-fsanitize={sanitizers}"] if sanitizers else ["-O2"]
    return flags + (["-fno-sanitize-recover=all"] if "undefined" in sanitizers else [])


def compile_with(sanitizers: str, words: list[str], folder: Path, patience: float) -> None:
    """Run the compiler; skips where the libraries of the sanitizers are missing."""
    command = ["g++", *flags_of(sanitizers), *words]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the {sanitizers} runtime is not installed")
    assert built.returncode == 0, built.stderr[-2000:]


def sources() -> list[str]:
    """The C++ side without its binding."""
    rooms = (REPOSITORY / "csrc" / room for room in ("base", "transport"))
    return [str(path) for room in rooms for path in sorted(room.glob("*.cc"))]


def build(program: str, sanitizers: str, folder: Path, *, patience: float = PATIENCE) -> Path:
    """A program of csrc/tests, with sanitizers or with none."""
    source = str(REPOSITORY / "csrc/tests" / f"{program}.cc")
    compile_with(sanitizers, [source, *sources(), "-ldl", "-o", program], folder, patience)
    return folder / program


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Builds a program of csrc/tests with sanitizers; what all programs share is compiled once."""
    folder = tmp_path_factory.mktemp("sanitized")
    build_fake_verbs(folder)
    compile_with(request.param, ["-c", *sources()], folder, 3 * PATIENCE)
    objects = [path.name for path in folder.glob("*.o")]

    def link(program: str) -> Path:
        source = str(REPOSITORY / "csrc/tests" / f"{program}.cc")
        compile_with(request.param, [source, *objects, "-ldl", "-o", program], folder, PATIENCE)
        return folder / program

    return link


def run(binary: Path, words: list[str]) -> None:
    """Run a program to its end, over the double of libibverbs beside it."""
    ran = subprocess.run(
        [str(binary), *words],
        env={**os.environ, "LD_LIBRARY_PATH": str(binary.parent)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_is_clean(sanitized: Callable[[str], Path]) -> None:
    binary = sanitized("stress")
    for words in (["shm", MANY], ["tcp", MANY], LARGE_TCP, RDMA, LARGE_RDMA):
        run(binary, words)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_a_hostile_peer_does_is_clean(sanitized: Callable[[str], Path]) -> None:
    """Ten thousands of inputs each; the program ends well only if all failures are typed."""
    binary = sanitized("hostile")
    for way in ("tcp", "notes", "sender", "shm", "board"):
        run(binary, [way, HOSTILE])
