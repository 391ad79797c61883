"""Runs of the training scripts on forked ranks, and what they wrote."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.dpp_train.data.token_files import Documents, TokenFileWriter, token_type
from tests.runtime.launcher import REPOSITORY, start, wait

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --transformer-impl local "
    "--distributed-backend gloo --num-workers 0 --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --train-iters 3 --eval-iters 1 "
    "--log-interval 1 --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 127"
)
"""A small GPT on CPUs."""


@dataclass(frozen=True)
class Result:
    """Lines of a run's metrics file, and what its ranks printed."""

    lines: list[dict[str, Any]]
    output: str

    def column(self, name: str) -> list[Any]:
        """A field of all lines that have it."""
        return [line[name] for line in self.lines if name in line]

    @property
    def numbers(self) -> list[tuple[Any, ...]]:
        """Losses and norms of the steps, and losses of evaluations: what two runs compare."""
        fields = ("iteration", "loss", "grad_norm", "sop loss", "validation_loss", "test_loss")
        return [tuple(line.get(name) for name in fields) for line in self.lines]


def train(
    folder: Path, num_ranks: int, *flags: str, script: str = "pretrain_gpt.py", timeout: float = 200
) -> Result:
    """Run a script to its end, and fail with what its ranks printed if one of them did not."""
    metrics = folder / f"metrics-{len(list(folder.iterdir()))}.jsonl"
    words = [*shlex.split(" ".join(flags)), "--metrics-file", str(metrics)]
    ranks = start(REPOSITORY / script, num_ranks, words, preload="training")
    finished = wait(ranks, timeout)
    for rank, one in enumerate(finished):
        assert one.returncode == 0, f"rank {rank} of {words}:\n{one.output[-6000:]}"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Result(lines, "".join(one.output for one in finished))


def write_corpus(prefix: Path, sizes: Sequence[int], *, words: int = 127, seed: int = 1) -> str:
    """Writes documents of random tokens; returns ``--data-path`` for them."""
    ids = np.random.default_rng(seed).integers(0, words, sum(sizes)).tolist()
    dtype = token_type(words)
    file = TokenFileWriter(prefix.with_suffix(".bin"), dtype)
    file.add(Documents.of(ids, list(sizes), [1] * len(sizes), dtype))
    file.finish(prefix.with_suffix(".idx"))
    return f"--data-path {prefix}"
