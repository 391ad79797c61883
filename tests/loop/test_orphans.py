"""``kill -9`` of a rank in the middle of a save, and of nothing else: its writers end with it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.runtime.launcher import start, wait

WORKER = Path(__file__).with_name("save_worker.py")


@pytest.mark.parametrize(("kind", "helpers"), [("sync", 1), ("async", 4)])
def test_writers_end_with_their_killed_rank(tmp_path: Path, kind: str, helpers: int) -> None:
    """Beside a writer, an asynchronous save has the process that waits for it, the manager of its
    queue, and Python's resource tracker."""
    job = start(WORKER, 1, [kind, str(tmp_path)])
    try:
        rank = psutil.Process(job[0].pid)
        deadline = time.monotonic() + 120
        while len(children := rank.children(recursive=True)) < helpers:
            assert job[0].poll() is None and time.monotonic() < deadline, wait(job, timeout=0)
            time.sleep(0.02)
        assert len(children) == helpers
        rank.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    finally:
        wait(job, timeout=0)  # kills the session
