"""Two runs that write one directory: the second is refused and told who holds it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.dpp_train.launch.job import find_job, refuse_taken
from megatron.dpp_train.launch.main import plan
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.preflight import check as preflight
from megatron.dpp_train.preflight.files import written_directories

from megatron.dpp.errors import DataError
from megatron.dpp.files import locks
from megatron.dpp.trace import TraceLayout, open_recorder
from tests.checkpoint.test_full_disk import FLAGS
from tests.loop.several import corpus
from tests.runtime.launcher import REPOSITORY, start, wait

_HOLD = """
import sys, time
from megatron.dpp.files.locks import lock_directory
lock = lock_directory(sys.argv[1], "--save")
print("held", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_of_two_is_refused_in_a_second_and_told_who_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # seconds that the second one has waited
    monkeypatch.setattr(locks, "time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s), time=time.time,
    ))  # fmt: skip
    first = holder(tmp_path)
    named = f"--save {tmp_path}: process {first.pid} on host {socket.gethostname()} writes there"
    try:
        for turn in range(1, 21):
            with pytest.raises(DataError, match=re.escape(named)):
                locks.lock_directory(tmp_path, "--save")
            with pytest.raises(DataError, match=re.escape(named)):
                locks.check_free(tmp_path, "--save")
            assert now[0] < turn
    finally:
        first.kill()
        first.communicate()
    with locks.lock_directory(tmp_path, "--save") as lock:  # gone with its process
        assert not lock.warning
    assert not (tmp_path / locks.LOCK_NAME).read_bytes()


@pytest.mark.parametrize("take", [locks.check_free, locks.lock_directory])
def test_the_processes_of_a_killed_run_have_a_moment_to_end(
    take: Callable[[Path, str], locks.Lock | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, waited = locks.lock_directory(tmp_path, "--save"), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > 0.1:
            lock.close()

    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=sleep, time=time.time)
    monkeypatch.setattr(locks, "time", clock)
    with take(tmp_path, "--save") or contextlib.nullcontext():
        pass
    assert 0.1 < sum(waited) < 0.2


def test_a_holder_on_another_host_that_did_not_release_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / locks.LOCK_NAME).write_text('{"host": "far-away", "process": 12}\n')
    with locks.lock_directory(tmp_path, "--save") as lock:
        assert "process 12 on host far-away did not release it" in lock.warning


def test_a_trace_file_has_one_writer(tmp_path: Path) -> None:
    layout = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)
    with open_recorder(tmp_path, rank=0, layout=layout):
        before = layout.path(tmp_path).read_bytes()
        with pytest.raises(DataError, match=rf"process {os.getpid()} on host .* writes there"):
            open_recorder(tmp_path, rank=0, layout=layout)
        assert layout.path(tmp_path).read_bytes() == before
    with open_recorder(tmp_path, rank=0, layout=layout):
        pass


def test_a_trace_without_a_named_place_meets_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``benchmark`` may link to a trace that another run writes; the launcher names a new place."""
    monkeypatch.chdir(tmp_path)
    words = [*f"{FLAGS} {corpus()}".split(), "--trace"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    (folder,) = (path for _, path in written_directories(preflight.check("gpt", words, 1)[0]))
    with locks.lock_directory(folder, "--trace-dir"):
        preflight.check_not_taken(preflight.check("gpt", words, 1)[0], by_launcher=True)
        args, _ = preflight.check("gpt", [*words, "--trace-dir", "benchmark"], 1)
        with pytest.raises(DataError, match=r"^--trace-dir "):
            preflight.check_not_taken(args, by_launcher=True)


DOORS = (
    ("train", "--save {0}"),
    ("train", "--save={0}"),
    ("train", "--run-dir {0}"),
    ("-m megatron.dpp train", "--save {0}"),
    ("-m megatron.dpp train --preset gpt-sample node", "--save {0}"),
    ("-m megatron.dpp train --preset gpt-sample node", "{0}"),
    ("-m megatron.dpp train --preset bert master", "--save {0}"),
    ("-m megatron.dpp train --preset flags pretrain_gpt.py", "--save {0}"),
)
"""(a launcher behind ``python``, words that name a directory)."""


@pytest.mark.parametrize(("door", "words"), DOORS)
def test_every_launcher_refuses_first(door: str, words: str, tmp_path: Path) -> None:
    taken = tmp_path / "held"
    with locks.lock_directory(taken, "--save"):
        command = [sys.executable, *door.split(), *words.format(taken).split()]
        second = subprocess.run(
            command, capture_output=True, text=True, cwd=REPOSITORY, timeout=150,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "GPUS_PER_NODE": "2"},
        )  # fmt: skip
    assert second.returncode == 2
    assert f"{taken}: process {os.getpid()} on host {socket.gethostname()}" in second.stderr
    assert ": error: --" in second.stderr and len(second.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("env", "taken"),
    [
        ({}, True),
        ({"RUN_DIR": "other"}, True),
        ({"NODE_RANK": "1"}, False),
        ({"SLURM_NODEID": "1"}, False),
        ({"DRY_RUN": "1"}, False),
    ],
)
def test_a_launcher_looks_where_the_locks_are_held(
    env: dict[str, str], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By node 0, and not for a dry run."""
    for name in ("RUN_DIR", "DRY_RUN", "NODE_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if not taken and "DRY_RUN" not in env:
        for name, value in {"NUM_NODES": "2", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
    words = [*_TRAIN, "--save", str(tmp_path)]
    with locks.lock_directory(tmp_path, "--save"):
        refused = pytest.raises(DataError) if taken else contextlib.nullcontext()
        with refused:
            plan(words)
        plan([*words, "--dry-run"])
        if taken:
            monkeypatch.setenv("RUN_DIR", str(tmp_path))
            with pytest.raises(DataError, match=r"^RUN_DIR "):
                plan(_TRAIN)
            plan([*_TRAIN, "--run-dir", "other"])


_TRAIN = [
    "--mode",
    "simple",
    "--procs",
    "1",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "9",
]


def test_the_launcher_knows_the_directory_of_a_layouts_trace(tmp_path: Path) -> None:
    """It refuses a second run of a layout before set-up and the check of the whole run."""
    job = find_job({"GPUS_PER_NODE": "4"})
    words = ["--use-dpp", "--pipeline-model-parallel-size", "2", "--trace-dir", str(tmp_path)]
    folder = tmp_path / "data-2-pipeline-2-tensor-1-dpp"
    with locks.lock_directory(folder, "--trace-dir"):
        with pytest.raises(DataError, match=f"^--trace-dir {folder}: process "):
            refuse_taken(job, parse_args([*words, "--trace"]))
        refuse_taken(job, parse_args(words))
        refuse_taken(job, parse_args([*words, "--trace", "--tensor-model-parallel-size", "2"]))
        refuse_taken(job, parse_args(["--trace"]))


def test_the_last_word_names_the_directory(tmp_path: Path) -> None:
    taken, free = str(tmp_path / "taken"), str(tmp_path / "free")
    with locks.lock_directory(taken, "--save"):
        plan([*_TRAIN, f"--save={taken}", "--save", free])
        with pytest.raises(DataError, match="--save"):
            plan([*_TRAIN, f"--save={free}", "--save", taken])


def test_two_runs_that_save_to_one_directory(tmp_path: Path) -> None:
    words = [*f"{FLAGS} {corpus()}".split(), "--save", str(tmp_path), "--save-interval", "1000"]
    words += ["--train-iters", "100000"]
    script = REPOSITORY / "pretrain_gpt.py"
    first = start(script, 2, words)
    try:
        lock, deadline = tmp_path / locks.LOCK_NAME, time.monotonic() + 120
        while not (lock.is_file() and lock.read_bytes()):
            assert time.monotonic() < deadline and first[0].poll() is None
            time.sleep(0.05)
        second = wait(start(script, 1, words), timeout=150)[0]
        assert second.returncode == 2
        assert f"error: --save {tmp_path}: process {first[0].pid} on host" in second.output
        with pytest.raises(DataError, match=f"process {first[0].pid} on"):
            preflight.check_not_taken(preflight.check("gpt", words, 1)[0])
        assert first[0].poll() is None
    finally:
        wait(first, timeout=0)


def test_an_attempt_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """It left the directory and an empty lock."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for name in ("new", "old"):
            with pytest.raises(DataError, match=f"--save {tmp_path}/{name}: File too large"):
                locks.lock_directory(tmp_path / name, "--save")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
