"""The benchmark of agreement runs to its end and prints every line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.runtime.launcher import REPOSITORY


@pytest.mark.slow
def test_every_line_has_its_two_numbers() -> None:
    command = [sys.executable, "profiling/bench_agreement.py", "--microbatches", "4"]
    done = subprocess.run(
        [*command, "--rounds", "1"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^\| (.+?) \| \d+\.\d \| \d+\.\d \|$", done.stdout, re.MULTILINE)
    names = ["alone", "leader", "follower", "follower behind the leader"]
    assert [line.split(": ")[-1] for line in lines] == names * 2
