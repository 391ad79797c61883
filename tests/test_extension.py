"""An installation without the C++ extension says so in one line, before any work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.config import missing_extension, missing_part
from tests.sources import ROOT

SCRIPT = "print('the script has started')"
DOORS = """
import torch
from megatron.dpp import DppConfig, DppSchedule, open_transport, plugin
from megatron.dpp.errors import DppError
from megatron.dpp.trace.host import HostTrace
from megatron.dpp.transport import ChannelSpec, Direction
channel = ChannelSpec(direction=Direction.FORWARD, source=0, destination=1, chunk=0, slot_bytes=64)
doors = [
    plugin.install,
    lambda: plugin.install(DppConfig(transport="shm")),
    DppSchedule,
    lambda: open_transport([channel], rank=0, store=torch.distributed.HashStore()),
]
for door in doors:
    try:
        door()
    except DppError as error:
        print(error)
plugin.install(trace=HostTrace(only=True, dir="."))  # records the script's own schedule
plugin.uninstall()
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the package as a checkout has it before anything is built."""
    folder = tmp_path_factory.mktemp("checkout")
    left_out = shutil.ignore_patterns("_native*", "__pycache__")
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=left_out)
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    (folder / "script.py").write_text(SCRIPT)
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the package of ``folder`` alone."""
    environment = {
        "PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",  # the import of PyTorch's compiler takes a second
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def said(folder: Path) -> str:
    return f"the C++ extension of the transport is not built for {sys.executable}: "


def test_a_script_does_not_start_without_it(without: Path) -> None:
    """It ended with an ImportError and a traceback, when its model was built."""
    done = run(without, "-m", "megatron.dpp.run", "script.py", "--use-dpp")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"megatron-dpp run: error: {said(without)}")
    assert "pip install --force-reinstall --no-deps WHEEL" in line


def test_a_checkout_names_the_command_that_builds_it(without: Path, tmp_path: Path) -> None:
    shutil.copytree(without, tmp_path, dirs_exist_ok=True)
    (tmp_path / "setup.py").touch()
    other = "_native.cpython-37m-x86_64-linux-gnu.so"
    (tmp_path / "megatron/dpp/transport" / other).touch()
    flags = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
        "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 1 --eval-iters 0 "
        "--transformer-impl local --mock-data --tokenizer-type NullTokenizer "
        "--vocab-size 100 --use-dpp"
    )
    done = run(tmp_path, "pretrain_gpt.py", *flags.split())
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"{sys.executable} ({other} is another Python's): " in line
    assert f"cd {tmp_path} && {sys.executable} setup.py build_ext --inplace (needs g++)" in line


def test_every_door_of_python_says_the_same(without: Path) -> None:
    done = run(without, "-c", DOORS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and len(set(lines)) == 1
    assert lines[0].startswith(said(without))


def test_an_installation_with_it_lacks_nothing() -> None:
    assert missing_extension() is None
    assert missing_part("auto") is None
