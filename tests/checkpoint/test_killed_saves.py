"""``kill -9`` while checkpoints are written: every restart finds a whole one and gives the numbers
of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.loop.several import corpus
from tests.runtime.launcher import REPOSITORY, Rank, start, wait

ITERATIONS = 400
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    f"--train-iters {ITERATIONS} --eval-iters 0 --transformer-impl local "
    "--device cpu --num-workers 0 --log-interval 1000 --hidden-dropout 0.1 --bf16 "
    "--use-distributed-optimizer --save-interval 1 --save-retain-interval 1000 "
)  # --save-retain-interval: as few files as possible


def _start(folder: Path, ranks: int, more: str) -> list[Rank]:
    data = REPOSITORY / "datasets_gpt"
    checkpoints = str(folder / "checkpoints")
    words = [
        *FLAGS.split(), *corpus().split(), *more.split(),
        "--vocab-file", str(data / "vocab.json"), "--merge-file", str(data / "merges.txt"),
        "--metrics-file", str(folder / "metrics.jsonl"),
    ]  # fmt: skip
    if folder.name == "killed":
        words += ["--save", checkpoints, "--load", checkpoints]
    return start(REPOSITORY / "pretrain_gpt.py", ranks, words)


def _kill_in_a_save(job: list[Rank], checkpoints: Path, delay: float) -> None:
    """Let two saves pass, then kill all ranks ``delay`` seconds into the next one."""
    deadline = time.monotonic() + 120
    for _ in range(3):
        seen = set(checkpoints.glob("*.unfinished"))
        while not set(checkpoints.glob("*.unfinished")) - seen:
            assert all(process.poll() is None for process in job), wait(job, timeout=1)
            assert time.monotonic() < deadline, "no save within 120 s"
            time.sleep(0.002)
    time.sleep(delay)
    for process in job:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    wait(job, timeout=10)


def _losses(folder: Path) -> dict[int, set[float]]:
    """Every value that any start of the run gave for an iteration."""
    losses: dict[int, set[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # the killed run's last line may be cut
            row = json.loads(line)
            if "lm loss" in row:
                losses.setdefault(row["iteration"], set()).add(row["lm loss"])
    return losses


def _check(tmp_path: Path, kills: int, ranks: int, more: str) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    moments = random.Random(20)
    for _ in range(kills):
        job = _start(killed, ranks, more)
        _kill_in_a_save(job, killed / "checkpoints", moments.uniform(0.0, 0.25))
    tracker = killed / "checkpoints" / "latest_checkpointed_iteration.txt"
    last = int(tracker.read_text()) + 2
    for folder in (killed, undisturbed):
        for each in wait(_start(folder, ranks, f"{more} --exit-interval {last}"), timeout=240):
            assert each.returncode == 0, each.output[-4000:]
    expected = _losses(undisturbed)
    assert last >= 2 * kills
    assert set(_losses(killed)) == set(expected) == set(range(1, last + 1))
    assert _losses(killed) == expected


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="torch_dist"),
        pytest.param("--ckpt-format torch", id="torch", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_its_saves_goes_on_bitwise(tmp_path: Path, more: str) -> None:
    _check(tmp_path, kills=1, ranks=1, more=more)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "more", ["", "--async-save", "--ckpt-format torch"], ids=["torch_dist", "async", "torch"]
)
def test_twenty_kills(tmp_path: Path, more: str) -> None:
    _check(tmp_path, kills=20, ranks=2, more=f"--pipeline-model-parallel-size 2 --use-dpp {more}")
