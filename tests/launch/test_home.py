"""The directory of a run: its name, the flags that fill it, and the log."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.locks import LOCK_NAME, lock_directory
from megatron.dpp_train.launch import log_copy
from megatron.dpp_train.launch.home import check_home, make_home, with_home
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig
from tests.conftest import REPOSITORY
from tests.test_culprits import COPIES

ARGV = ["--num-layers", "4", "--hidden-size", "64", "--pipeline-model-parallel-size", "2"]


def placed(home: Path, argv: list[str]) -> RunConfig:
    """Settings of a run in ``home``."""
    return with_home(parse_args(argv).frozen(), home)


def test_every_run_has_a_directory_and_latest_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    homes = [make_home("gpt", parse_args(ARGV), 4, {}) for _ in range(3)]
    assert len(set(homes)) == 3
    assert all("-gpt-4x64-tp1-pp2-dp2" in home.name for home in homes)
    assert (tmp_path / "runs" / "latest").resolve() == homes[-1].resolve()
    named = make_home("gpt", parse_args(ARGV), 4, {"RUN_DIR": "mine"})
    assert named == tmp_path / "mine" and named.is_dir()
    assert (tmp_path / "runs" / "latest").resolve() == homes[-1].resolve()


def test_flags_that_name_a_place_are_kept(tmp_path: Path) -> None:
    argv = [*ARGV, "--trace", "--trace-dir", "benchmark", "--metrics-file", "m.jsonl"]
    args = placed(tmp_path, argv)
    assert (args.trace_dir, args.metrics_file) == ("benchmark", "m.jsonl")
    args = placed(tmp_path, [*ARGV, "--trace"])
    assert args.trace_dir == args.parsed["trace_dir"] == str(tmp_path / "traces")
    assert args.given["trace_dir"] == "--trace-dir"
    assert args.metrics_file == str(tmp_path / "metrics.jsonl")


def test_the_log_holds_what_is_printed_and_streams_stay_apart(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from megatron.dpp_train.launch.log_copy import copy_output\n"
        "copy_output(Path(sys.argv[1]))\n"
        "os.execvp('sh', ['sh', '-c', 'seq 20000; echo wrong >&2; exit 7'])"
    )
    log = tmp_path / "train.log"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True, text=True, timeout=150, cwd=REPOSITORY,
    )  # fmt: skip
    assert ran.returncode == 7
    assert ran.stdout.splitlines() == [str(number) for number in range(1, 20001)]
    assert ran.stderr == "wrong\n"
    assert sorted(log.read_text().split()) == sorted([*ran.stdout.split(), "wrong"])


_RUN = """
import os, signal, sys
from megatron.dpp_train.launch.log_copy import LogWatch
signal.signal(signal.SIGTERM, lambda *_: os.environ.update(ENDED="by SIGTERM"))
with LogWatch():
    for number in range(100 if os.environ["ROUNDS"] == "1" else 10**9):
        print(number, flush=True)
        if "ENDED" in os.environ:
            break
    print("ended", os.environ.get("ENDED", ""), file=sys.stderr)
"""


def copied(log: Path, output: str, rounds: str) -> str:
    """The errors of :data:`_RUN` where its standard output goes to ``output``."""
    code = f"{shlex.join([sys.executable, '-c', COPIES, str(log), _RUN])} {output}"
    ran = subprocess.run(
        ["bash", "-c", f"{code}; exit ${{PIPESTATUS[0]}}"],
        stderr=subprocess.PIPE, text=True, timeout=150, cwd=REPOSITORY,
        env={**os.environ, "ROUNDS": rounds},
    )  # fmt: skip
    assert ran.returncode == 0
    return ran.stderr


def test_a_run_whose_reader_leaves_is_ended_with_words(tmp_path: Path) -> None:
    """``| head -1``: each rank, and torchrun after it, ended by a traceback of its next line."""
    said = copied(tmp_path / "log", "| head -1", "many")
    first = "the reader of standard output has left: the run ends"
    assert said.strip().splitlines() == [first, "ended by SIGTERM"]
    lines = (tmp_path / "log").read_text().splitlines()
    assert first in lines and lines[0] == "0" and lines[-1] == "ended by SIGTERM"


def test_a_run_goes_on_where_its_output_cannot_be_written(tmp_path: Path) -> None:
    """``> run.txt`` on a full disk, or a terminal that is gone, ended it by tracebacks."""
    said = copied(tmp_path / "log", ">/dev/full", "1")
    first = "warning: standard output cannot be written (No space left on device): read "
    assert said.strip().splitlines() == [f"{first}{tmp_path / 'log'}", "ended"]
    assert {*map(str, range(100))} <= set((tmp_path / "log").read_text().splitlines())


def test_a_reader_that_takes_little_at_a_time_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a long line\n")
    os.close(write_end)
    taken: list[bytes] = []

    def write(stream: int, data: bytes) -> int:
        taken.append(data[:5])
        return len(taken[-1])

    with monkeypatch.context() as patch:
        patch.setattr(log_copy, "os", SimpleNamespace(read=os.read, write=write))
        log_copy._copy({read_end: 1}, (tmp_path / "log").open("ab", buffering=0), "log", 0)
    os.close(read_end)
    assert b"".join(taken) == (tmp_path / "log").read_bytes() == b"a long line\n"


def test_checkpoints_go_into_the_directory_where_an_interval_asks_for_them(tmp_path: Path) -> None:
    def saves(*words: str) -> list[str]:
        save = placed(tmp_path, [*ARGV, *words]).save
        return [save] if save and save.startswith(str(tmp_path)) else []

    assert saves("--train-iters", "100", "--save-interval", "50") == [str(tmp_path / "checkpoints")]
    assert not saves("--train-iters", "100", "--save-interval", "10000")
    assert not saves("--train-iters", "100")
    assert not saves("--train-iters", "100", "--save-interval", "50", "--save", "elsewhere")


def check(home: Path, *words: str, first_node: bool = True) -> None:
    check_home(parse_args([*ARGV, *words]), {"RUN_DIR": str(home)}, first_node=first_node)


def test_a_directory_takes_no_second_run_but_the_one_that_goes_on(tmp_path: Path) -> None:
    home, saved, other = tmp_path / "home", str(tmp_path / "saved"), str(tmp_path / "other")
    check(home)
    home.mkdir()
    for log in ("train.log", "train-node0.log"):  # the nodes did not meet, or the shell's own
        (home / log).touch()
    check(home)  # no run has begun to train
    (home / "settings.yaml").write_text(f'save: "{saved}"\n# load: null\n')
    continued = re.escape(f"settings.yaml of an earlier run is there; name another directory, or "
    f"let that run go on: --load {saved}")  # fmt: skip
    for words in ([], ["--load", other], ["--save", saved], ["--load", saved, "--finetune"]):
        with pytest.raises(DataError, match=continued):
            check(home, *words)
    check(home, "--load", f"{saved}/../saved")
    (home / "settings.yaml").rename(home / "metrics.jsonl")  # the last rank's node has it alone
    with pytest.raises(DataError, match=r"metrics.jsonl of an earlier run"):
        check(home, first_node=False)


def test_a_run_goes_on_where_its_directories_were_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, moved = tmp_path / "home", str(tmp_path / "moved")
    home.mkdir()
    (home / "settings.yaml").write_text('save: "somewhere/else"\n')
    check(home, "--save", moved, "--load", f"{moved}/.")  # started again by a batch system
    check(home, "--load", str(home / "checkpoints"))
    monkeypatch.chdir(home)
    check(Path("."), "--load", "checkpoints")
    for words in (["--load", moved], ["--load", f"{home}-2"], ["--save", moved]):
        with pytest.raises(DataError, match="go on: --load somewhere/else"):
            check(home, *words)


def test_a_directory_in_use_is_refused_on_the_first_node_alone(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    for folder in (tmp_path, tmp_path / "save"):
        with lock_directory(folder, "--save"):
            with pytest.raises(DataError, match="writes there"):
                check(tmp_path, "--save", str(tmp_path / "save"))
            check(tmp_path, "--save", str(tmp_path / "save"), first_node=False)


def test_both_starts_refuse_the_directory_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").touch()
    environment = {**os.environ, "RUN_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    for words in (["bash", "run_single_gpt.sh"], [sys.executable, "train", "--max-steps", "2"]):
        why = f"{words[1]}: error: RUN_DIR {tmp_path}: settings.yaml of an earlier run"
        ran = subprocess.run(
            words, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 2, ran.stderr
        assert ran.stderr.startswith(why)
        assert [each.name for each in tmp_path.iterdir()] == ["settings.yaml"]


_START = """
import os, sys
from pathlib import Path
from megatron.dpp.errors import DppError
from megatron.dpp_train.launch.log_copy import copy_output
from megatron.dpp.locks import lock_directory
home = Path(sys.argv[1])
try:
    lock = lock_directory(home, "RUN_DIR")
except DppError as error:
    sys.exit(f"error: {error}")
lock.keep_over_exec()
copy_output(home / "train.log", lock)
os.execvp("sh", ["sh", "-c", "echo started; exec sleep 30"])
"""


def test_a_second_run_into_one_directory_is_refused_while_the_first_one_lasts(
    tmp_path: Path,
) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _START, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )  # fmt: skip

    first = start()
    try:
        assert first.stdout is not None and first.stdout.readline() == "started\n"
        second = start()
        said = second.communicate(timeout=150)[1]
        who = f"process {first.pid} on host {socket.gethostname()}"
        assert second.returncode == 1 and f"RUN_DIR {tmp_path}: {who} writes there" in said
    finally:
        first.kill()
        first.communicate()
    deadline = time.monotonic() + 60
    while (tmp_path / LOCK_NAME).read_bytes():  # released by the process that copies the log
        assert time.monotonic() < deadline
        time.sleep(0.05)
