"""``kill -9`` of one rank in mid-iteration: the others end soon, name it, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.loop.several import corpus
from tests.nodes import running
from tests.runtime.launcher import REPOSITORY, Rank, free_port, start, wait
from tests.shared_memory import none_left

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 100000 --eval-iters 0 --transformer-impl local --device cpu "
    "--pipeline-model-parallel-size 2 --use-dpp --num-workers 0 --log-interval 100000 "
)

PATH = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def _start(metrics: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", "2", *_program(metrics),
        ],
        cwd=metrics.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def _program(metrics: Path, further: str = "") -> list[str]:
    data = REPOSITORY / "datasets_gpt"
    return [
        str(REPOSITORY / "pretrain_gpt.py"), *f"{FLAGS} {corpus()} {further}".split(),
        "--metrics-file", str(metrics),
        "--vocab-file", str(data / "vocab.json"), "--merge-file", str(data / "merges.txt"),
    ]  # fmt: skip


def _start_ranks(metrics: Path, further: str = "") -> list[subprocess.Popen[str]]:
    """Four ranks without a launcher, which would end the others before they say what they met."""
    job = {
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH,
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *_program(metrics, further)],
            cwd=metrics.parent,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]


def _wait_for_iterations(job: subprocess.Popen[str] | Rank, metrics: Path) -> None:
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert job.poll() is None, job.communicate(timeout=10)[0]
        assert time.monotonic() < deadline, "no iteration within 120 s"
        time.sleep(0.1)


def test_the_other_ends_and_names_the_killed_rank(tmp_path: Path) -> None:
    script, *words = _program(tmp_path / "metrics.jsonl")
    with none_left():
        left, victim = start(Path(script), 2, words)
        try:
            _wait_for_iterations(left, tmp_path / "metrics.jsonl")
            children = psutil.Process(left.pid).children(recursive=True)
            victim.kill()
            said, _ = left.communicate(timeout=150)
        finally:
            wait([left, victim], timeout=0)
    assert left.returncode == 1, said
    assert f"rank 1 (pid {victim.pid} on" in said.splitlines()[-1], said
    assert "Traceback" not in said, said
    assert not running(children)


@pytest.mark.slow
def test_torchrun_ends_the_others_and_names_the_killed_rank(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with none_left():
        job = _start(metrics)
        try:
            _wait_for_iterations(job, metrics)
            children = psutil.Process(job.pid).children(recursive=True)
            (victim,) = (p for p in children if p.environ().get("RANK") == "1")
            victim.send_signal(signal.SIGKILL)
            output, _ = job.communicate(timeout=150)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGABRT)
                print(job.communicate()[0])
    assert job.returncode != 0
    assert "rank 1" in output or "local_rank: 1" in output
    assert not running(children)


@pytest.mark.slow
def test_the_ranks_of_another_replica_name_it_too(tmp_path: Path) -> None:
    """Ranks 0 and 2 are one pipeline, 1 and 3 the other; gloo's errors name no rank."""
    metrics = tmp_path / "metrics.jsonl"
    _kill_and_check(_start_ranks(metrics), 1, metrics)


EXPERTS = "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_all_ranks_of_expert_groups_name_the_killed_one(tmp_path: Path, victim: int) -> None:
    """Ranks 0 and 2 lead their stages, 1 and 3 follow them; all tasks hold collectives."""
    metrics = tmp_path / "metrics.jsonl"
    _kill_and_check(_start_ranks(metrics, EXPERTS), victim, metrics)


def _kill_and_check(ranks: list[subprocess.Popen[str]], victim: int, metrics: Path) -> None:
    """Kill a rank (not 0, which holds the store) amid training; each other one names it."""
    try:
        _wait_for_iterations(ranks[0], metrics)
        ranks[victim].kill()
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in {0, 1, 2, 3} - {victim}:
        assert ranks[rank].returncode == 1, said[rank]
        assert f"rank {victim} (pid {ranks[victim].pid} on" in said[rank].splitlines()[-1], said[
            rank
        ]
        assert "Traceback" not in said[rank], said[rank]
