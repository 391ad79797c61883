"""Ctrl-C while a program is still starting."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "megatron-dpp": ["-m", "megatron.dpp", "doctor"],
    "run": ["-m", "megatron.dpp.run", "x.py"],
    "a door": ["profiling/aggregate.py"],
    "train": ["train", "--help"],
    "a rank": ["pretrain_gpt.py"],
    "set-up": ["tools/setup_environment.py", "--describe", "requirements.txt"],
}
_PRESSED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
_PRESSED += "signal.raise_signal(signal.SIGINT)\n"
_ABORTS = """
import os, signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    os.abort()
"""
_PYTHON = '#!/bin/sh\necho "Traceback: KeyboardInterrupt" >&2\nkill -INT $PPID\nexit 1\n'

_heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""Lets a process heed Ctrl-C, which a job behind ``&`` ignores with all that it starts."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_during_imports_is_silent(name: str, tmp_path: Path) -> None:
    """It showed a traceback of the imports."""
    (tmp_path / "pathlib.py").write_text(_PRESSED)  # in the place of Python's own
    ended = subprocess.run(
        [sys.executable, "-S", *PROGRAMS[name]], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("command", ["run train"])
def test_ctrl_c_while_pytorch_is_imported_waits_for_its_end(command: str, tmp_path: Path) -> None:
    """Its C++ code ended the process by SIGABRT."""
    (tmp_path / "torch.py").write_text(_ABORTS)
    ended = subprocess.run(
        [sys.executable, "-m", "megatron.dpp", *command.split()], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60, preexec_fn=_heed,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "")


def test_ctrl_c_during_the_search_for_python_is_no_python_that_is_too_old(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    for command in (["tools/setup.sh"], ["megatron-dpp", "doctor"], ["run_single.sh"]):
        ended = subprocess.run(
            ["bash", *command], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PYTHON": str(python)}, timeout=60, preexec_fn=_heed,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (130, "")
