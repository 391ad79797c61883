"""Reports of a test's processes, when one of them is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.transport.kinds import PATIENCE, Results, forked


def test_a_process_killed_while_it_reports_does_not_silence_the_others(tmp_path: Path) -> None:
    def body(rank: int, _: str, results: Results) -> None:
        if rank == 0:
            while True:  # until the way is full and the process waits in the midst of a report
                results.put("much")
        while not (tmp_path / "killed").exists():
            time.sleep(0.01)
        results.put("heard")

    with forked(2, body, tmp_path) as (processes, results):
        assert results.get(timeout=PATIENCE) == "much"
        time.sleep(0.2)
        os.kill(processes[0].pid or 0, signal.SIGKILL)
        processes[0].join(PATIENCE)
        (tmp_path / "killed").touch()
        while results.get(timeout=PATIENCE) != "heard":
            pass
