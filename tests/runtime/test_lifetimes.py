"""Promises of schedules from call to call; lifetimes_worker.py has the checks."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("lifetimes_worker.py")


def test_a_schedule_outlives_what_it_began_with(tmp_path: Path) -> None:
    assert run_ranks(WORKER, 2, [str(tmp_path)], timeout=300).count("ok ") == 2 * 14
