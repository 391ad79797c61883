"""The master and worker scripts for real, on two hosts that are network namespaces.

A node has a stage of the pipeline, which crosses the wire, and ``per_node`` tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.several import SPLIT, tokens
from tests.netns import ADDRESSES, Hosts, two_hosts
from tests.nodes import Node, end, lines, numbers, running, wait_for_end, wait_for_iterations
from tests.parity.runs import REPOSITORY, train
from tests.runtime.launcher import free_port
from tests.shared_memory import none_left

PATIENCE = 120.0
START = 300.0  # of a run, where the machine is busy or the scripts build the extension first
SETTINGS = {
    "PIPELINE_PARALLEL": "2", "MODEL_CHUNKS": "2", "NUM_LAYERS": "4",
    "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "2", "SEQ_LENGTH": "32", "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "4", "TRAIN_ITERS": "100000", "EVAL_ITERS": "0", "TRACE": "0",
    "LOG_INTERVAL": "100000", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
ITERATIONS = 3
_FLAGS = ("--num-workers", "0", *SPLIT.split())
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def sizes(per_node: int, nodes: int = 1) -> dict[str, str]:
    """Settings of the model, and of a node's ranks. The small corpus spares the nodes to tokenise
    the sample, both at once, where no one has done so yet."""
    layout = {"TENSOR_PARALLEL": str(per_node), "GPUS_PER_NODE": str(nodes * per_node)}
    return {**SETTINGS, **layout, "DATA_PATH": str(tokens())}


@contextlib.contextmanager
def nodes(
    hosts: Hosts, folder: Path, per_node: int = 1, *, peer_timeout: float = 3.0, **worker: str
) -> Iterator[tuple[Node, Node, Path]]:
    """Both scripts, running; ends them with everything that they started."""
    metrics = folder / "metrics.jsonl"
    shared = {**sizes(per_node), "MASTER_ADDR": ADDRESSES[0], "NUM_NODES": "2"}
    started: list[Node] = []
    try:
        for host, role in enumerate(("master", "worker")):
            words = ["bash", f"run_{role}_gpt.sh", "--metrics-file", str(metrics)]
            words += ["--dpp-peer-timeout", f"{peer_timeout:g}", *_FLAGS]
            log = folder / f"{role}.log"
            more = worker if role == "worker" else {}
            started.append(Node(hosts.command(host, *words), log, **shared, **more))
        yield started[0], started[1], metrics
    finally:
        end(*started)


def single_node(
    folder: Path, per_node: int, iterations: int = ITERATIONS
) -> list[tuple[float, float]]:
    """The numbers of one node with the ranks of two, with the flags that its script shows."""
    shown = subprocess.run(
        ["bash", "run_single_gpt.sh"],
        env={**os.environ, **sizes(per_node, nodes=2), "DRY_RUN": "1", "PYTHON": sys.executable},
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    _, _, flags = shown.stdout.splitlines()[-1].partition("pretrain_gpt.py ")
    train(folder, "single", 2 * per_node, flags, "--exit-interval", str(iterations), *_FLAGS)
    return numbers(folder / "single.jsonl", iterations)


@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_nodes_train_like_one_and_end_when_the_wire_is_cut(
    hosts: Hosts, tmp_path: Path, per_node: int
) -> None:
    with none_left(), nodes(hosts, tmp_path, per_node) as (master, worker, metrics):
        wait_for_iterations(ITERATIONS, metrics, START, master, worker)
        started = master.tree() + worker.tree()
        hosts.cut()
        wait_for_end(PATIENCE, master, worker)
        for node, first in ((master, per_node), (worker, 0)):
            assert node.process.returncode != 0
            peers = range(first, first + per_node)
            assert any(f"rank {peer} (pid" in node.said() for peer in peers), node.said()
        assert per_node == 1 or "rank 0 -> 1: shm" in master.said()
        assert f"rank 0 -> {per_node}: tcp" in master.said()
        assert not running(started)
    expected = single_node(tmp_path, per_node)
    assert len(expected) == ITERATIONS
    assert numbers(metrics, ITERATIONS) == expected  # bitwise


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 5.0, 20.0])
def test_a_blackout_changes_no_loss(hosts: Hosts, seconds: float, tmp_path: Path) -> None:
    """Everything between the hosts is away: our links, gloo's and torchrun's."""
    with none_left(), nodes(hosts, tmp_path, peer_timeout=30.0) as (master, worker, metrics):
        wait_for_iterations(ITERATIONS, metrics, START, master, worker)
        hosts.cut()
        time.sleep(seconds)
        done = len(lines(metrics))
        hosts.restore()
        wait_for_iterations(done + ITERATIONS, metrics, START, master, worker)
        assert "rank 0 -> 1: tcp" in master.said()
    iterations = done + ITERATIONS
    assert numbers(metrics, iterations) == single_node(tmp_path, 1, iterations)  # bitwise


@pytest.mark.slow
def test_a_killed_node_ends_the_other_one(hosts: Hosts, tmp_path: Path) -> None:
    with nodes(hosts, tmp_path) as (master, worker, metrics):
        wait_for_iterations(ITERATIONS, metrics, START, master, worker)
        for process in worker.tree():
            process.kill()
        wait_for_end(PATIENCE, master)
        assert master.process.returncode != 0
        assert "rank 1 (pid" in master.said(), master.said()


@pytest.mark.slow
def test_unequal_arguments_are_refused_with_both_values(hosts: Hosts, tmp_path: Path) -> None:
    with nodes(hosts, tmp_path, LR="0.5") as (master, worker, _):
        wait_for_end(PATIENCE, master, worker)
        for node in (master, worker):
            assert node.process.returncode != 0
            assert "--lr is 0.002 on rank 0 and 0.5 on rank 1" in node.said(), node.said()


@pytest.mark.slow
def test_a_worker_that_never_comes(tmp_path: Path) -> None:
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WAIT_SECONDS": "3"}
    log = tmp_path / "master.log"
    words = ["bash", "run_master_gpt.sh", *_FLAGS]
    master = Node(words, log, **sizes(2), **settings)
    wait_for_end(PATIENCE, master)
    assert master.process.returncode != 0
    assert "error: not all nodes came" in master.said()
    assert "Traceback" not in master.said()
