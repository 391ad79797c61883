"""Every end of torchrun is one line to a user, without a traceback."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import config_from_args, parse_args

from megatron.dpp.errors import tell_torchrun
from megatron.dpp_train.checkpoint.files import TRACKER
from megatron.dpp_train.launch import torchrun as launch
from tests.conftest import REPOSITORY
from tests.runtime.launcher import start, wait


def failed(exit_code: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=exit_code, error_file="none")
    return ChildFailedError("pretrain_gpt.py", {1: failure})


ENDS = {
    "failed": (failed(3), 1, "error: rank 1 (process 77) ended first, with exit code 3"),
    "killed": (failed(-9), 1, "ended first, by SIGKILL: see above why"),
    "cut short": (failed(-7), 1, "first, by SIGBUS (a file that it had mapped was cut short, or"),
    "interrupted": (SignalException("told to", signal.SIGINT), 130, "ended by SIGINT; its"),
    "early": (KeyboardInterrupt(), 130, "ended by SIGINT"),
    "taken": (
        DistNetworkError("no server on 6000, name: EADDRINUSE"),
        1,
        "EADDRINUSE): another run has this port; name another MASTER_PORT",
    ),
    "alone": (DistStoreError("timed out."), 1, "error: not all nodes came (timed out): start"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, code, text = ENDS[name]

    def end() -> None:
        raise error

    monkeypatch.setattr(launch, "main", end)
    assert launch.run() == code
    said = capsys.readouterr().err
    assert text in said
    assert len(said.splitlines()) == 1


def test_a_rank_that_c_code_ends_names_the_limit_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ulimit -v 2000000``: all there was to read was ``terminate called``."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (2_048_000_000, 2_048_000_000))
    error = failed(-signal.SIGABRT)

    def end() -> None:
        raise error

    monkeypatch.setattr(launch, "main", end)
    assert launch.run() == 1
    assert (
        "by SIGABRT; this process may map 2000000 KiB (ulimit -v): see" in capsys.readouterr().err
    )


def test_bad_input_is_told_where_rank_0_had_no_time_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All ranks find it, rank 0 prints it, and torchrun had ended rank 0 before: nothing was above
    `see above why`."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("DPP_PROGRAM", "train")
    tell_torchrun("train: error: --save DIR: Permission denied", printed=False)
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=2, error_file=str(file))

    def end() -> None:
        raise ChildFailedError("pretrain_gpt.py", {1: failure})

    monkeypatch.setattr(launch, "main", end)
    assert launch.run() == 1
    assert capsys.readouterr().err.splitlines() == [
        "train: error: --save DIR: Permission denied",
        "train: error: rank 1 (process 77) ended first, with exit code 2: see above why",
    ]


def test_the_rank_that_a_signal_ended_came_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peer's error, which it caused, was seen before, and named as the first."""
    codes = {0: -signal.SIGTERM, 1: -signal.SIGSEGV, 2: -signal.SIGKILL}
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=70 + rank, exitcode=code, error_file="none")
        for rank, code in codes.items()
    }
    failures[0].timestamp -= 1
    failures[2].timestamp += 30  # torchrun's own

    def end() -> None:
        raise ChildFailedError("pretrain_gpt.py", dict(sorted(failures.items(), reverse=True)))

    monkeypatch.setattr(launch, "main", end)
    assert launch.run() == 1
    said = "error: rank 1 (process 71) ended first, by SIGSEGV: see above why\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_temporary_directory_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert launch.run() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: the temporary directory cannot be used ([Errno 2]" in line


@pytest.mark.parametrize("name", ["interrupted", "early"])
def test_an_interrupted_run_names_its_checkpoint_and_the_command_that_goes_on(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def end() -> None:
        raise ENDS[name][0]

    monkeypatch.setattr(launch, "main", end)
    monkeypatch.setenv("DPP_GO_ON", "megatron-dpp train --mode simple --resume-from")
    monkeypatch.setenv("DPP_SAVE", str(tmp_path))
    assert launch.run() == 130
    assert "there is no checkpoint to go on from" in capsys.readouterr().err
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / TRACKER).write_text("20")
    assert launch.run() == 130
    said = capsys.readouterr().err
    assert f"the checkpoint of iteration 20 is in {tmp_path}, to go on: megatron-dpp train" in said
    assert said.endswith(f"--mode simple --resume-from {tmp_path}\n")
    assert len(said.splitlines()) == 1


def test_what_a_thread_says_about_the_end_does_not_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        raise RuntimeError("cannot join current thread")

    monkeypatch.setattr(launch, "main", end)
    assert launch.run() == 130
    assert capsys.readouterr().err == "ended by SIGINT\n"


def test_torchruns_folder_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    seen = []

    def write() -> None:
        folder = Path(os.environ["PET_LOG_DIR"])
        (folder / "attempt_0").mkdir()
        seen.append(folder)

    monkeypatch.setattr(launch, "main", write)
    assert launch.run() == 0
    assert seen[0].parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_torchrun_goes_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stayed in the temporary directory for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(launch, "main", lambda: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        launch.run()
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(launch, "main", lambda: None)
    assert launch.run() == 0
    assert left.name.startswith("torchrun_") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 2])
def test_several_processes_of_a_node_get_one_thread_each_without_a_banner(
    count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", {})
    words = ["torchrun", f"--nproc_per_node={count}", "--standalone", "script.py"]

    def configure() -> None:
        config_from_args(parse_args(words[1:]))

    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(launch, "main", configure)
    assert launch.run() == 0
    assert os.environ.get("OMP_NUM_THREADS") == (None if count == 1 else "1")
    assert "OMP_NUM_THREADS" not in caplog.text


_MEET = """
import sys
from datetime import timedelta
from megatron.dpp_train.launch.torchrun import _TimedStore
_TimedStore("127.0.0.1", int(sys.argv[1]), 2, False, timedelta(seconds=1), multi_tenant=True)
"""


def test_a_port_of_another_program_ends_the_wait(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(_MEET)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (result,) = wait(start(script, 1, [str(port)]), 120)
    assert result.returncode == 1
    assert f"error: 127.0.0.1:{port} accepts connections and does not answer" in result.output
    assert "WAIT_SECONDS=1: another program listens there" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("before", ["trap '' HUP;", ""])
def test_nohup_keeps_a_run_when_its_terminal_closes(tmp_path: Path, before: str) -> None:
    """torchrun takes SIGHUP for itself, whatever it was started with, and ended the ranks."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\nprint('to the end')\n"
    )
    words = [sys.executable, "-m", launch.__name__, "--standalone", str(script)]
    code = f"{before} exec {shlex.join(words)}"
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=150, cwd=REPOSITORY
    )
    assert (done.returncode == 0) == bool(before), done.stderr
    assert ("to the end" in done.stdout) == bool(before)
