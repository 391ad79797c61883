"""Runs of ``megatron.training`` on converted models, for tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("train_worker.py")
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 96 "
    "--lr 1e-3 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --adam-eps 1e-5 "
    "--clip-grad 1 --log-interval 1 --eval-iters 0 --eval-interval 100 "
    "--hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--num-workers 0 --dataloader-type single --ckpt-format torch_dist --no-save-optim"
)
NUMBER = r"([\d.E+-]+)"


@dataclass(frozen=True)
class Losses:
    """Loss and gradient norm of each step in a run's log."""

    losses: list[float]
    norms: list[float]


def train(num_ranks: int, rows: Path, words: str, *, timeout: float = 300) -> Losses:
    """Run a command line on forked ranks; what it logged."""
    arguments = f"{FLAGS} {words} --moe-aux-loss-coeff 0".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS", str(rows))
        log = run_ranks(WORKER, num_ranks, arguments, timeout, preload="training")
    return Losses(*(
        list(map(float, re.findall(rf"{name}: {NUMBER}", log))) for name in ("lm loss", "grad norm")
    ))  # fmt: skip
