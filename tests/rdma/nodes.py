"""Runs in the guest: the master and worker scripts on its two hosts, with RDMA between them.

    nodes.py cut|kill DATA_PREFIX

They train, beside ``single.py``, whose numbers theirs must equal bit by bit. Then, in the middle of
an iteration, the cable is pulled (of RDMA and of the rest), or every process of one node is killed.
All that is left has to end by itself, name the lost rank and its host, and leave nothing behind.
Importing PyTorch takes a minute in every process here, and that is most of the time this needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.nodes import Node, end, lines, numbers, running, wait_for_end, wait_for_iterations

ADDRESSES = ("10.99.0.1", "10.99.0.2")
ITERATIONS = 3
PATIENCE = 2600.0  # seconds until it trains, or ends on its own: all is slow here
SETTINGS = {
    "VOCAB_FILE": "datasets_gpt/vocab.json", "MERGE_FILE": "datasets_gpt/merges.txt",
    "TENSOR_PARALLEL": "1", "PIPELINE_PARALLEL": "2", "MODEL_CHUNKS": "1", "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "2", "SEQ_LENGTH": "32", "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "8", "TRAIN_ITERS": "100000", "EVAL_ITERS": "0", "TRACE": "0",
    "WAIT_SECONDS": "1800", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
HERE = Path(__file__).resolve().parent


def on_host(number: int, *words: str) -> list[str]:
    """A command that runs on one of the hosts, under the host's name."""
    named = ["sh", "-c", f'hostname host{number} && exec "$@"', "sh"]
    return ["ip", "netns", "exec", f"host{number}", "unshare", "--uts", *named, *words]


def two_nodes(folder: Path) -> tuple[Node, Node, Path]:
    """The scripts on their hosts, just started."""
    metrics = folder / "metrics.jsonl"
    shared = {"MASTER_ADDR": ADDRESSES[0], "NODE_IPS": ",".join(ADDRESSES), "NUM_NODES": "2"}
    master, worker = (
        Node(
            on_host(number, "bash", f"run_{role}_gpt.sh", "--metrics-file", str(metrics)),
            folder / f"{role}.log",
            GPUS_PER_NODE="1",
            **shared,
            **SETTINGS,
        )
        for number, role in enumerate(("master", "worker"))
    )
    return master, worker, metrics


def single_node(folder: Path) -> tuple[Node, Path]:
    """The same training on one node, in shared memory, just started."""
    metrics = folder / "single.jsonl"
    words = ["--metrics-file", str(metrics), "--exit-interval", str(ITERATIONS)]
    command = [sys.executable, str(HERE / "single.py"), *words]
    return Node(command, folder / "single.log", **SETTINGS), metrics


def names_the_lost(node: Node, rank: int) -> str:
    """The node's line about the lost rank; fails unless it names rank, host and message."""
    said = node.said()
    lost = rf"rank {rank} \(pid \d+ on host{rank}, rdma\)"
    missing = "the oldest missing message here is|waited for something else"  # a collective
    found = re.search(rf"[^\n]*{lost}[^\n]*({missing})[^\n]*", said)
    assert found, f"host{1 - rank} does not name rank {rank} on host{rank}:\n{said}"
    assert node.process.returncode != 0
    return found[0].strip()


def nothing_is_left(memory: set[str]) -> None:
    """No entry in /dev/shm, no socket that is open, no queue pair of a process."""
    assert set(os.listdir("/dev/shm")) <= memory, os.listdir("/dev/shm")
    for number in range(2):
        sockets = ["ss", "-Htanp", "state", "connected", "state", "listening"]
        shown = output("ip", "netns", "exec", f"host{number}", *sockets)
        assert "users:" not in shown, f"host{number} still has sockets:\n{shown}"
    pairs = output("rdma", "resource", "show", "qp")
    assert "type RC" not in pairs, pairs


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def train(master: Node, worker: Node, metrics: Path, single: Node, expected: Path) -> None:
    """Until both runs have made some iterations, which must be equal."""
    wait_for_iterations(ITERATIONS, metrics, PATIENCE, master, worker)
    say(f"training over RDMA, {time.monotonic() - STARTED:.0f} s after the start")
    assert "rank 0 -> 1: rdma (different hosts with RDMA devices" in master.said(), master.said()
    wait_for_end(PATIENCE, single)
    assert single.process.returncode == 0, single.said()
    found = numbers(metrics, ITERATIONS)
    assert found == numbers(expected, ITERATIONS), (found, lines(expected))
    say(f"{len(found)} iterations over rdma and over shm: equal, bit by bit")
    done = len(lines(metrics))
    wait_for_iterations(done + 1, metrics, PATIENCE, master, worker)
    time.sleep(2)  # into the next one's pipeline, past what ends an iteration


def kill(master: Node, worker: Node) -> None:
    started = master.tree() + worker.tree()
    for process in worker.tree():
        process.kill()
    seconds = wait_for_end(PATIENCE, master)
    say(f"the other node has ended {seconds:.1f} s after the kill")
    say(f"a killed node was named after {seconds:.1f} s: {names_the_lost(master, 1)}")
    worker.process.wait()
    assert not running(started)


def cut(master: Node, worker: Node) -> None:
    started = master.tree() + worker.tree()
    # This order, so that neither side can tell the other what it has found.
    output("ip", "-n", "host1", "link", "set", "host-wire1", "down")
    output("ip", "link", "set", "wire1", "down")
    seconds = wait_for_end(PATIENCE, master, worker)
    say(f"both nodes have ended {seconds:.1f} s after the cut")
    assert not running(started)
    for node, lost in ((master, 1), (worker, 0)):
        say(f"a pulled cable was named after {seconds:.1f} s: {names_the_lost(node, lost)}")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    os.environ["DATA_PATH"] = sys.argv[2]
    subprocess.run(["bash", str(HERE / "control.sh")], check=True)
    memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        master, worker, metrics = two_nodes(Path(folder))
        single, expected = single_node(Path(folder))
        try:
            train(master, worker, metrics, single, expected)
            {"kill": kill, "cut": cut}[sys.argv[1]](master, worker)
        finally:
            end(master, worker, single)
    nothing_is_left(memory)
    say(f"nothing is left behind, {time.monotonic() - STARTED:.0f} s after the start")


STARTED = time.monotonic()
main()
