"""The view of a run in the terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report import monitor_command
from megatron.dpp.report.reader import open_run
from megatron.dpp.report.run_files import find_run
from tests.report.injected import call, inject
from tests.report.synthetic import Run, write

ROOT = Path(__file__).resolve().parents[2]
SLOW = inject(Run(iterations=5), "slow-rank", 0)


def monitor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call(monitor_command.main, "--once", *arguments)


def test_a_directory_without_traces_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no trace"):
        find_run(tmp_path).need_traces()
    assert "no trace" in monitor("--benchmark_dir", str(tmp_path)).stderr


def test_the_monitor_shows_ranks_and_loss(tmp_path):
    directory = write(SLOW, tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"iteration": 7, "loss": 3.25}, {"iteration": 7, "validation_loss": 9.0}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iterat')
    done = monitor("--benchmark_dir", str(directory), "--metrics-file", str(metrics))
    assert done.returncode == 0, done.stderr
    assert "Loss 3.25 at iteration 7" in done.stdout and "An iteration takes" in done.stdout
    ranks = [line.split() for line in done.stdout.splitlines() if line[:5].strip().isdigit()]
    assert [row[:3] for row in ranks] == [[f"{r}", f"{r}", "ended"] for r in range(4)]
    shares = [float(cell[:-1]) for row in ranks for cell in row[3:5]]
    assert all(95 < busy + idle <= 100.1 for busy, idle in zip(*[iter(shares)] * 2, strict=True))


def test_the_monitor_tells_a_dead_rank(tmp_path):
    directory = write(SLOW, tmp_path, whole=False)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = next(directory.glob("*pipeline-2*"))
    head, process = path.read_text(), f'"process":{gone.pid}'
    path.write_text(re.sub(r'"process":\d+', process, head, count=1))
    done = monitor("--benchmark_dir", str(directory))
    assert done.returncode == 3
    states = [line.split()[2] for line in done.stdout.splitlines() if line[:5].strip().isdigit()]
    assert states == ["runs", "runs", "DEAD", "runs"]


def test_a_run_without_a_whole_iteration_shows_its_ranks(tmp_path):
    directory = write(SLOW, tmp_path)
    for path in directory.iterdir():
        path.write_bytes(path.read_bytes()[:2000])
    done = monitor("--benchmark_dir", str(directory))
    assert done.stdout.count("no iteration that all ranks finished yet") == 4
    assert done.returncode == 0


def test_a_rank_is_alive_while_its_process_is_here_and_elsewhere_nobody_knows(tmp_path):
    (known,) = open_run(write(Run(ranks=1, iterations=1), tmp_path))
    here, no_process = socket.gethostname(), 2**22 + 1  # Linux has no more
    for host, process, found in (
        (here, os.getpid(), True), (here, no_process, False),
        (f"{here}-2", os.getpid(), None), (f"{here}-2", no_process, None),
    ):  # fmt: skip
        file = dataclasses.replace(known, host=host, process=process)
        assert file.alive is found
