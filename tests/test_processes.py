"""Programs that are started end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.dpp.processes import exits_on_sigterm, run_child, sigint_held_back
from tests.runtime.launcher import REPOSITORY

ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_STARTER = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from megatron.dpp.processes import run_child
sys.exit(run_child([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_child_ends_with_its_starter(number: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert starter.stdout is not None and starter.stdout.readline() == b"up\n"
        (child,) = psutil.Process(starter.pid).children()
        starter.send_signal(number)
        _, alive = psutil.wait_procs([child], timeout=30)
        assert not alive
        assert starter.wait(30) != 0
    finally:
        starter.kill()
        starter.communicate()


_TORCHRUN = """
import subprocess, sys
rank = "from megatron.dpp import processes; processes.begin_program(); print('up', flush=True)"
subprocess.run([sys.executable, "-c", rank + "; input()"])
"""


def test_a_rank_ends_with_a_killed_torchrun() -> None:
    """Nothing else tells it: two ranks that exchange messages went on for ever."""
    torchrun = subprocess.Popen(
        [sys.executable, "-c", _TORCHRUN], cwd=REPOSITORY, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=os.environ | {"TORCHELASTIC_RUN_ID": "none"},
    )  # fmt: skip
    try:
        assert torchrun.stdout is not None and torchrun.stdout.readline() == b"up\n"
        (rank,) = psutil.Process(torchrun.pid).children()
        torchrun.kill()
        _, alive = psutil.wait_procs([rank], timeout=30)
        assert not alive
    finally:
        torchrun.kill()
        torchrun.communicate()


def test_a_childs_status_is_told() -> None:
    assert run_child([sys.executable, "-c", "import sys; sys.exit(7)"]) == 7


def test_sigterm_is_an_exit_that_cleans_up() -> None:
    with pytest.raises(SystemExit) as left, exits_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(10)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupt_that_an_import_would_swallow_comes_after_it() -> None:
    come_to = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job behind & ignores it
    try:
        with pytest.raises(KeyboardInterrupt), sigint_held_back():
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pytest.fail("it came in the block")
            come_to = True
        assert come_to and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ((), ASCII_ONLY, "utf-8 ['Łódź'] 1"),
        ((), {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "gbk"}, "utf-8 ['Łódź'] 1"),
        ((), {**ASCII_ONLY, "PYTHONUTF8": "1"}, "utf-8 ['Łódź'] 0"),
        (("-I", "-X", "utf8=0"), ASCII_ONLY, "utf-8 ['Łódź'] 2"),
    ],
)
def test_a_program_of_another_encoding_begins_again_in_utf8(
    options: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    """PyTorch's sources could not be read in ASCII, and runs ended with its traceback."""
    code = (
        f"import codecs, locale, sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from megatron.dpp.processes import begin_program; begin_program()\n"
        "name = codecs.lookup(locale.getpreferredencoding(False)).name\n"
        "sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape')\n"
        "print(name, sys.argv[1:2], sys.orig_argv.count('-X'))"
    )
    command = [sys.executable, *options, "-c", code, "Łódź"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, timeout=60)
    assert done.stdout.decode().strip() == said, done.stderr.decode()


def test_what_utf8_does_not_have_is_printed_as_an_escape() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from megatron.dpp.processes import begin_program\n"
        "sys.stdout.reconfigure(errors='strict')  # as outside of the locale C\n"
        "begin_program(); print(sys.argv[1])"
    )
    env = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": ""}
    command = [sys.executable, "-c", code, b"run\xff"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=60)
    assert done.stdout == b"run\\udcff\n", done.stderr.decode()


@pytest.mark.parametrize("words", [("-m", "megatron.dpp"), ("pretrain_gpt.py",), ("train",)])
def test_the_doors_use_utf8(words: tuple[str, ...]) -> None:
    env = {**os.environ, **ASCII_ONLY, "DPP_TRAIN_PYTHON": "set up"}  # for train: no set-up
    command = [sys.executable, *words, "--łódź"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert "--łódź" in done.stderr.decode()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_file_changes_nothing_else(closed: str, tmp_path: Path) -> None:
    """Its number is not that of a file of the run, and no error is on standard output."""
    code = (
        "import sys; from megatron.dpp.processes import begin_program; begin_program()\n"
        "made = open(sys.argv[1], 'w'); print('out'); print('error', file=sys.stderr)\n"
        "sys.stdout.flush(); sys.exit(made.fileno() < 3)"
    )
    command = ["bash", "-c", f'exec "$@" {closed}', "", sys.executable, "-c", code]
    done = subprocess.run(
        [*command, str(tmp_path / "made")], cwd=REPOSITORY, capture_output=True, text=True
    )
    out, error = "" if " >" in f" {closed}" else "out\n", "" if "2>" in closed else "error\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, out, error)


@pytest.mark.parametrize(
    "words", [("-m", "megatron.dpp.run"), (str(REPOSITORY / "pretrain_gpt.py"),)]
)
def test_a_working_directory_that_is_gone_is_one_line(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """PyTorch's libraries cannot be loaded there, and say no more than that."""
    gone = ["bash", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "", sys.executable]
    done = subprocess.run(
        [*gone, *words, __file__], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "error: the working directory cannot be used (No such file or" in done.stderr
