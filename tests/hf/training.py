"""Runs of ``megatron.training`` on converted models, for tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.runtime.launcher import free_port, run_ranks

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


class Losses:
    """Loss and gradient norm of each step in a run's log."""

    def __init__(self, log: Path) -> None:
        text = log.read_text()
        self.losses = [float(x) for x in re.findall(rf"lm loss: {NUMBER}", text)]
        self.norms = [float(x) for x in re.findall(rf"grad norm: {NUMBER}", text)]


def train_each(
    folder: Path, num_ranks: int, rows: Path, runs: dict[str, str], *, timeout: float = 300
) -> dict[str, Losses]:
    """Run all command lines after each other on the same ranks; what each logged, by its name."""
    cases = [
        [name, free_port(), f"{FLAGS} {words} --moe-aux-loss-coeff 0".split()]
        for name, words in runs.items()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS", str(rows))
        run_ranks(
            WORKER, num_ranks, [str(folder / "cases.json")], timeout=timeout, preload="libraries"
        )
    last = num_ranks - 1
    return {name: Losses(folder / f"{name}.{last}.log") for name in runs}
