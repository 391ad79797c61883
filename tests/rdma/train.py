"""Runs in the guest: two ranks train the sample GPT over RDMA, one device each, then over shared
memory; losses and hashes of the parameters must be equal, bit by bit.

PyTorch is imported once and the ranks are forked, because importing takes a minute here; so nothing
of torchrun is in it. Prints one line at the end, and exits with a message where something differs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron.core import parallel_state  # noqa: F401  (imported before the ranks are forked)

import megatron.dpp.runtime.schedule  # noqa: F401
from megatron.dpp.train.pretrain import main

ADDRESSES = "10.99.0.1,10.99.0.2"
ITERATIONS = 3
SAME = ("lm loss", "grad norm", "parameters_sha256")
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    f"--train-iters {ITERATIONS} --eval-iters 0 --mock-data --transformer-impl local --device cpu "
    "--pipeline-model-parallel-size 2 --use-dpp --num-workers 0 --dpp-checksum "
    "--vocab-file datasets_gpt/vocab.json --merge-file datasets_gpt/merges.txt"
).split()


def train(kind: str, port: int, folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics file of a run whose links are of one kind."""
    metrics = folder / f"{kind}.jsonl"
    words = [*FLAGS, "--dpp-transport", kind, "--metrics-file", str(metrics)]
    if kind == "rdma":
        words += ["--node-ips", ADDRESSES]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": f"wire{rank}",
            }  # fmt: skip
            status = main("gpt", words)
            sys.stdout.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit(f"training over {kind} failed")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def run() -> None:
    """Train over both kinds, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        rdma, shm = (
            train(kind, 29400 + number, Path(folder)) for number, kind in enumerate(("rdma", "shm"))
        )
    for one, other in zip(rdma, shm, strict=True):
        for name in SAME:
            if one.get(name) != other.get(name):
                sys.exit(f"{name} over rdma: {one.get(name)}, over shm: {other.get(name)}")
    print(f"{len(rdma) - 1} iterations over rdma and over shm: equal, bit by bit")


run()
