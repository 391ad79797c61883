"""The live view: files that grow, ranks that die, a run that starts again."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report.follow import FollowedRun, alive
from megatron.dpp.report.run_files import find_run
from tests.report.injected import inject
from tests.report.synthetic import Run, write

ROOT = Path(__file__).resolve().parents[2]
SLOW = inject(Run(iterations=5), "slow-rank", 0)


def monitor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron.dpp", "monitor", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)


def test_a_growing_file_is_read_once_and_cut_anywhere(tmp_path):
    directory = write(SLOW, tmp_path)
    texts = {path: path.read_bytes() for path in directory.iterdir()}
    for path, text in texts.items():
        path.write_bytes(text[:2000])
    run = FollowedRun(directory)
    run.poll()
    assert run.iterations() == []
    for end in range(2000, max(map(len, texts.values())) + 3001, 3001):
        for path, text in texts.items():
            with path.open("ab") as file:
                file.write(text[end : end + 3001])
        run.poll()
    assert [i.number for i in run.iterations()] == [0, 1, 2, 3, 4]
    assert all(file.ended for file in run.files.values())
    assert len(run.iterations()[2].ranks[1].tasks) == 24


def test_a_new_run_takes_the_place_of_the_old(tmp_path):
    run = FollowedRun(write(Run(ranks=2, iterations=5), tmp_path), keep=3)
    run.poll()
    assert [i.number for i in run.iterations()] == [2, 3, 4]
    write(Run(ranks=2, iterations=1), tmp_path)
    run.poll()
    assert [i.number for i in run.iterations()] == [0]


def test_a_new_run_that_is_longer_already_is_noticed(tmp_path):
    """The writer truncates the file in place, and it may be longer than before at the next look."""
    directory = write(Run(ranks=1, iterations=2), tmp_path)
    run = FollowedRun(directory)
    run.poll()
    write(Run(ranks=1, iterations=6), tmp_path)
    (path,) = directory.iterdir()
    text = path.read_text()
    path.write_text(text.replace('"start_unix_ns":17', '"start_unix_ns":18').rsplit("\n", 2)[0])
    run.poll()
    assert [i.number for i in run.iterations()] == list(range(6))
    assert not run.files[path].ended


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
    assert "iteration 7  loss 3.2500" in done.stdout
    assert done.stdout.count("ended") == 1 + 4


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


def test_an_iteration_is_shown_when_every_rank_has_finished_it(tmp_path):
    run = FollowedRun(write(SLOW, tmp_path))
    assert run.iterations() == []
    for rank, numbers in enumerate([(4, 3, 1), (1, 2, 3)]):
        own = [SimpleNamespace(number=number, rank=rank) for number in numbers]
        run.files[tmp_path / str(rank)] = SimpleNamespace(iterations=own)
    found = run.iterations()
    assert [one.number for one in found] == [1, 3]


def test_a_rank_is_alive_while_its_process_is_here_and_elsewhere_nobody_knows():
    here, no_process = socket.gethostname(), 2**22 + 1  # Linux has no more
    for host, process, found in (
        (here, os.getpid(), True), (here, no_process, False),
        (f"{here}-2", os.getpid(), None), (f"{here}-2", no_process, None),
    ):  # fmt: skip
        assert alive(SimpleNamespace(host=host, process=process)) is found
