"""Other projects' own training code has the same numbers under the dynamic schedule, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.real.run import HOSTS, TIMEOUT, packages
from tests.runtime.launcher import REPOSITORY

SOURCES = Path(os.environ.get("DPP_HOSTS", "."))
PYTHON = os.environ.get("DPP_HOSTS_PYTHON", sys.executable)
"""The Python whose environment has what the hosts import."""


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("host", sorted(HOSTS))
def test_the_hosts_own_update_is_bitwise_that_of_its_schedule(host: str) -> None:
    if not packages(host, SOURCES):
        pytest.skip(f"no sources in {SOURCES / host} (DPP_HOSTS)")
    done = subprocess.run(
        [PYTHON, "-m", "tests.plugin.real.run", host, "--sources", str(SOURCES.resolve())],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    assert "lines equal bit by bit" in done.stdout
