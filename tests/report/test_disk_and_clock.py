"""Runs on a full disk, runs that were killed, several runs at once, and jumps of the wall clock."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron.dpp.report import aggregate_command, monitor_command, report_command
from megatron.dpp.report.reader import open_run
from megatron.dpp.report.run_files import read_state, read_training, write_state
from megatron.dpp.trace import TraceLayout, open_recorder
from tests.report.synthetic import Run, write


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process grows above so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (report_command, "report.html"),
        (aggregate_command, "all.json"),
        (aggregate_command, "all.json.gz"),
    ],
)
def test_a_full_disk_keeps_the_last_file_and_is_one_line_that_names_it(
    command, name, tmp_path, capsys
):
    run, folder = write(Run(ranks=2), tmp_path / "run"), tmp_path / "out"
    folder.mkdir()
    (folder / name).write_text("earlier")
    with full_disk(500):
        status = command.main([str(run), "--output", str(folder / name)])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 1 and line.endswith(f"error: [Errno 27] File too large: '{folder / name}'")
    assert [path.read_text() for path in folder.iterdir()] == ["earlier"]


def test_a_trace_that_met_a_full_disk_is_reported_as_far_as_it_goes(tmp_path, capsys):
    """One line says so; training goes on."""
    layout = TraceLayout(
        data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1
    )  # fmt: skip
    with full_disk(8000), pytest.warns(UserWarning, match="the trace ends here") as told:
        recorder = open_recorder(tmp_path, rank=0, layout=layout)
        for number in range(200):
            recorder.begin_iteration(number)
            recorder.begin_task("F", 0, 0)
            recorder.end_task()
            recorder.end_iteration()
        recorder.close()
    assert len(told) == 1 and str(layout.path(tmp_path)) in str(told[0].message)
    assert report_command.main([str(tmp_path)]) == 0
    assert "The traces of 1 ranks have no end" in capsys.readouterr().out
    assert not open_run(layout.path(tmp_path).parent)[0].complete


@pytest.mark.parametrize("jump", [-100_000, 100_000])
def test_jumps_of_the_wall_clock_change_no_state(jump, tmp_path, monkeypatch):
    """A run whose process lives runs; metrics that nobody writes any more are those of one that has
    ended, also where the clock was ahead when they were written.
    """
    write_state(tmp_path, "running")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    assert read_training(tmp_path / "other").state == "running"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + jump)
    assert str(read_state(tmp_path)) == "running"
    assert read_training(tmp_path / "other").state == "ended"


BEGIN = "from megatron.dpp.report.run_files import write_state; write_state({!r}, 'running')"


def test_of_two_runs_the_killed_one_has_failed_and_the_other_goes_on(tmp_path, capsys):
    """Its process is a zombie as long as nobody has asked for its end."""
    homes, children = [tmp_path / name for name in ("one", "two")], []
    for home in homes:
        home.mkdir()
        code = f"{BEGIN.format(str(home))}; print(flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        children.append(subprocess.Popen([sys.executable, "-c", code], **pipes))
        assert children[-1].stdout.readline()
        line = {"iteration": 3, "train_iters": 9, "loss": 2.5, "ms": 1000.0}
        (home / "metrics.jsonl").write_text(json.dumps(line) + "\n" + '{"iterat')
    try:
        children[0].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, children[0].pid, os.WEXITED | os.WNOWAIT)
        gone = f"failed: process {children[0].pid} ended without saying why"
        for home, status, state in zip(homes, (3, 0), (gone, "running"), strict=True):
            assert monitor_command.main([str(home), "--once"]) == status
            assert capsys.readouterr().out.startswith(f"{home}: {state}\nIteration 3 of 9, {state}")
    finally:
        for child in children:
            child.kill()
            child.communicate()
