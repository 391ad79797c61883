"""Programs as nodes of a run: started, watched, and ended with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "DPP_SOAK"
_OF_KILLED = re.compile("wandb-(media|artifacts)$|^torchinductor_")
"""Names of folders that packages leave, whose process was killed."""


class Node:
    """One node's script, whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, **settings: str) -> None:
        self.log = log
        shown = {"PYTHON": sys.executable, "PYTHONFAULTHANDLER": "1"}
        environment = {**os.environ, **shown, **settings}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tree(self) -> list[psutil.Process]:
        """The script's process and all that descend from it."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def said(self) -> str:
        """All its output so far."""
        return self.log.read_text(errors="replace")


def end(*nodes: Node) -> None:
    """Kill what is left of the nodes."""
    for process in [process for node in nodes for process in node.tree()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for node in nodes:
        node.process.wait()


def stacks(*nodes: Node) -> str:
    """Makes all Python processes print their stacks; returns the output of the nodes."""
    ranks = [
        process for node in nodes for process in node.tree()[::-1]
    ]  # before torchrun ends them
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    psutil.wait_procs(ranks, timeout=5)
    return "\n".join(node.said() for node in nodes)


def running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that have not ended. An orphan stays a zombie until init collects it."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def marked() -> list[psutil.Process]:
    """Processes with :data:`MARK` of this one, also those that have lost their parents."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()):
                found.append(process)
    return running(found)


def left_behind(before: set[str], temporary: Path, known: Collection[str] = ()) -> list[str]:
    """Things that an ended job left: processes, shared memory, temporary files but those of the
    names ``known``. The files go.
    """
    deadline, left = time.monotonic() + 30.0, ["?"]
    while left and time.monotonic() < deadline:
        left = [f"process {p.pid} {' '.join(p.cmdline())[:200]}" for p in marked()]
        left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before]
        names = {path.name for path in temporary.iterdir()} - {*known}
        left += [str(temporary / name) for name in names if not _OF_KILLED.search(name)]
        time.sleep(0.2 if left else 0.0)
    for path in temporary.iterdir() if left else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    return left


def lines(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def numbers(metrics: Path, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first iterations."""
    return [(line["loss"], line["grad_norm"]) for line in lines(metrics)[:count]]
