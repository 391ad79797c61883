"""An error of one rank of a host that has installed the plug-in reaches the others by name."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.launcher import start, wait

WORKER = Path(__file__).with_name("error_worker.py")


def test_the_reason_of_one_rank_reaches_the_others() -> None:
    """It is told as the process ends: its Python must be one of its own."""
    first, second = wait(start(WORKER, 2, [], fresh=True), 100)
    assert first.returncode and second.returncode
    assert "ValueError: a host's own trouble" in second.output
    assert "rank 1 " in first.output and "ValueError: a host's own trouble" in first.output
