"""A rank that waits elsewhere when its peer is lost is ended; one that notices is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from megatron.dpp.transport.abandon import Abandon

BLOCKED = """
import threading
from megatron.dpp.transport.abandon import Abandon
Abandon(lambda: "rank 1 (pid 7 on node7, tcp) died", 0, 0.01)
threading.Event().wait(20)
"""


def test_a_blocked_rank_is_ended_with_the_reason() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED], env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "error: rank 0: rank 1 (pid 7 on node7, tcp) died. This rank has waited" in ran.stderr


def test_a_blocked_rank_names_a_stopped_process_of_its_own() -> None:
    """On another host than the ranks that it kept waiting nobody named its data loader's worker."""
    stopped = "import os, signal; os.fork() or os.kill(os.getpid(), signal.SIGSTOP)"
    program = f"{stopped}\n{BLOCKED}"
    ran = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.getcwd()},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = ran.stderr.readline() if ran.stderr else ""
    finally:
        os.killpg(ran.pid, signal.SIGKILL)
        ran.communicate(timeout=150)
    assert "since (process " in said and "(python), which it started, is stopped): ended" in said


def test_a_rank_that_notices_goes_on() -> None:
    asked = threading.Event()

    def failure() -> str:
        asked.set()
        return "lost"

    watch = Abandon(failure, 0, grace=60.0)
    assert asked.wait(60.0)
    watch.stop()
    watch.stop()


def test_a_watch_may_end_itself() -> None:
    made, ended = threading.Event(), threading.Event()

    def failure() -> str:
        assert made.wait(60.0)
        watch.stop()
        ended.set()
        return ""

    watch = Abandon(failure, 0, 60.0)
    made.set()
    assert ended.wait(60.0)
