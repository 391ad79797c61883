"""Start a script once per rank, wait with a deadline, and show every rank's stacks when it passes.

What is started is always killed: the ranks form one session of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """Exit status and output of one rank."""

    returncode: int
    output: str


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Place = Callable[[int], tuple[list[str], dict[str, str]]]
"""By rank: the words before its command, and environment variables of its own."""


def _here(rank: int) -> tuple[list[str], dict[str, str]]:
    return [], {}


def start(
    script: Path, num_ranks: int, arguments: list[str], place: Place = _here
) -> list[subprocess.Popen[str]]:
    """Start ``num_ranks`` processes of ``script`` with torchrun's environment variables."""
    port = str(free_port())
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore",
            **place(rank)[1],
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [*place(rank)[0], sys.executable, "-X", "faulthandler", str(script), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return processes


def wait(processes: list[subprocess.Popen[str]], timeout: float) -> list[Finished]:
    """Wait for all; after ``timeout`` seconds make the rest print their stacks and kill them."""
    deadline = time.monotonic() + timeout
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        stuck = [p for p in processes if p.poll() is None]
        for process in stuck:
            process.send_signal(signal.SIGABRT)  # faulthandler prints all threads
        return [_collect(p) for p in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _collect(process: subprocess.Popen[str]) -> Finished:
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return Finished(process.returncode, output)


def run_ranks(
    script: Path,
    num_ranks: int,
    arguments: list[str],
    timeout: float = 120.0,
    place: Place = _here,
) -> str:
    """All ranks' output; an AssertionError with all of it when a rank fails or hangs."""
    finished = wait(start(script, num_ranks, arguments, place), timeout)
    everything = "\n".join(
        f"--- rank {rank}: exit status {one.returncode}\n{one.output}"
        for rank, one in enumerate(finished)
    )
    assert all(one.returncode == 0 for one in finished), everything
    return everything
