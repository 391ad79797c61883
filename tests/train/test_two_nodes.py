"""The master and worker scripts for real, on two hosts that are network namespaces.

TP2 x PP2: the tensor-parallel ranks of a stage share a node, the pipeline crosses the wire.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.netns import ADDRESSES, Hosts, two_hosts
from tests.runtime.launcher import REPOSITORY, free_port

PATIENCE = 120.0
NOTICED = 10.0  # seconds in which both nodes must have ended
SETTINGS = {
    "TENSOR_PARALLEL": "2", "PIPELINE_PARALLEL": "2", "MODEL_CHUNKS": "2", "NUM_LAYERS": "4",
    "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "2", "SEQ_LENGTH": "32", "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "4", "TRAIN_ITERS": "100000", "EVAL_ITERS": "0", "TRACE": "0",
    "LOG_INTERVAL": "100000", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
ITERATIONS = 3


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


class Node:
    """One node's script, whose output goes to a file."""

    def __init__(self, command: list[str], log: Path, **settings: str) -> None:
        self.log = log
        environment = {**os.environ, **SETTINGS, "PYTHON": sys.executable, **settings}
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
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def nodes(hosts: Hosts, folder: Path, **worker: str) -> Iterator[tuple[Node, Node, Path]]:
    """Both scripts, running; ends them with everything that they started."""
    metrics = folder / "metrics.jsonl"
    shared = {"MASTER_ADDR": ADDRESSES[0], "GPUS_PER_NODE": "2", "NUM_NODES": "2"}
    started: list[Node] = []
    try:
        for host, role in enumerate(("master", "worker")):
            words = ["bash", f"run_{role}_gpt.sh", "--metrics-file", str(metrics)]
            log = folder / f"{role}.log"
            more = worker if role == "worker" else {}
            started.append(Node(hosts.command(host, *words), log, **shared, **more))
        yield started[0], started[1], metrics
    finally:
        for process in [process for node in started for process in node.tree()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in started:
            node.process.wait()


def lines(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def wait_for_iterations(metrics: Path, *running: Node) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(lines(metrics)) < ITERATIONS:
        for node in running:
            assert node.process.poll() is None, node.said()
        assert time.monotonic() < deadline, "\n".join(node.said() for node in running)
        time.sleep(0.05)


def wait_for_end(*ending: Node) -> float:
    start = time.monotonic()
    for node in ending:
        try:
            node.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            for process in node.tree():
                process.send_signal(signal.SIGABRT)
            pytest.fail(f"a node has not ended:\n{node.said()}")
    return time.monotonic() - start


def single_node(folder: Path) -> list[dict[str, Any]]:
    metrics = folder / "single.jsonl"
    words = ["--metrics-file", str(metrics), "--exit-interval", str(ITERATIONS)]
    settings = {"GPUS_PER_NODE": "4", "MASTER_PORT": str(free_port())}
    node = Node(["bash", "run_single_gpt.sh", *words], folder / "single.log", **settings)
    wait_for_end(node)
    assert node.process.returncode == 0, node.said()
    return lines(metrics)


def numbers(entries: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(e["lm loss"], e["grad norm"]) for e in entries[:ITERATIONS]]


def test_two_nodes_train_like_one_and_end_when_the_wire_is_cut(
    hosts: Hosts, tmp_path: Path
) -> None:
    memory = set(os.listdir("/dev/shm"))
    expected = numbers(single_node(tmp_path))
    assert len(expected) == ITERATIONS
    with nodes(hosts, tmp_path) as (master, worker, metrics):
        wait_for_iterations(metrics, master, worker)
        started = master.tree() + worker.tree()
        hosts.cut()
        seconds = wait_for_end(master, worker)
        print(f"both nodes ended {seconds:.1f} s after the cut")
        assert numbers(lines(metrics)) == expected  # bitwise
        for node, peers in ((master, "23"), (worker, "01")):
            assert node.process.returncode != 0
            assert any(f"rank {peer} (pid" in node.said() for peer in peers), node.said()
        assert "rank 0 -> 1: shm" in master.said()
        assert "rank 0 -> 2: tcp" in master.said()
        assert not [process for process in started if process.is_running()]
    assert set(os.listdir("/dev/shm")) <= memory
    assert seconds < 2 * NOTICED  # twice: other tests may run on the same cores


@pytest.mark.slow
def test_a_killed_node_ends_the_other_one(hosts: Hosts, tmp_path: Path) -> None:
    with nodes(hosts, tmp_path) as (master, worker, metrics):
        wait_for_iterations(metrics, master, worker)
        for process in worker.tree():
            process.kill()
        seconds = wait_for_end(master)
        assert master.process.returncode != 0
        assert "rank 2 (pid" in master.said() or "rank 3 (pid" in master.said(), master.said()
        assert seconds < 2 * NOTICED


@pytest.mark.slow
def test_unequal_arguments_are_refused_with_both_values(hosts: Hosts, tmp_path: Path) -> None:
    with nodes(hosts, tmp_path, LR="0.5") as (master, worker, _):
        wait_for_end(master, worker)
        for node in (master, worker):
            assert node.process.returncode != 0
            assert "--lr is 0.002 on rank 0 and 0.5 on rank 2" in node.said(), node.said()


@pytest.mark.slow
def test_a_worker_that_never_comes(tmp_path: Path) -> None:
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WAIT_SECONDS": "3"}
    log = tmp_path / "master.log"
    master = Node(["bash", "run_master_gpt.sh"], log, GPUS_PER_NODE="2", **settings)
    wait_for_end(master)
    assert master.process.returncode != 0
    assert "error: not all nodes came" in master.said()
    assert "Traceback" not in master.said()
