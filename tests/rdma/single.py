"""Runs in the guest: what run_single_gpt.sh would train, on two ranks of one node.

    single.py FLAG...

PyTorch is imported once and the ranks are forked, because importing takes a minute here: so
torchrun has no part in it, and its command (DRY_RUN=1) gives the flags.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import megatron.training  # noqa: F401  (imported before the ranks are forked)

from megatron.dpp.errors import exit_with
from megatron.dpp_train.pretrain import main

RANKS = 2


def flags() -> list[str]:
    """The flags that the launch script passes to pretrain_gpt.py."""
    command = subprocess.run(
        ["bash", "run_single_gpt.sh", *sys.argv[1:]],
        env={**os.environ, "DRY_RUN": "1", "GPUS_PER_NODE": str(RANKS)},
        check=True,
        capture_output=True,
        text=True,
    )
    words = shlex.split(command.stdout.splitlines()[-1])
    (script,) = [index for index, word in enumerate(words) if word.endswith("/pretrain_gpt.py")]
    return words[script:]


def run() -> int:
    """Train; 1 when a rank failed."""
    words = flags()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            sys.argv = words
            exit_with(lambda: main("gpt"))
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return int(any(statuses))


sys.exit(run())
