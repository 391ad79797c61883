"""Exit statuses and messages of programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", ["--pp 8 --microbatches 64 --grid", "--pp 2"])
def test_a_reader_that_leaves_ends_the_program_quietly(words: str) -> None:
    """``| head`` ends it without a traceback, at a write or at the end."""
    program = subprocess.Popen(
        [sys.executable, "-m", "megatron.dpp.sim", *words.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait(120) == 1
    program.stderr.close()
