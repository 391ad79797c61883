"""Weights & Biases: values, the rank that writes them, and errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.loop.logs import Writers
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.state import Run
from tests.runtime.launcher import REPOSITORY, start, wait

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 3 --eval-iters 1 --eval-interval 3 --mock-data --transformer-impl local "
    f"--vocab-file {REPOSITORY}/datasets_gpt/vocab.json --device cpu --num-workers 0 "
    f"--merge-file {REPOSITORY}/datasets_gpt/merges.txt --wandb-project p --wandb-exp-name try "
)


class _Recorded(ModuleType):
    """Stands for the package: keeps the values that it gets."""

    class Error(Exception):
        """The package's error."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.opened: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.finished = 0
        self.refusal: str | None = None

    def init(self, **options: Any) -> _Recorded:
        if self.refusal:
            raise self.Error(self.refusal)
        self.opened = options
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    module = _Recorded()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def _run(folder: Path, rank: int) -> Run:
    args = parse_args(f"{FLAGS} --wandb-save-dir {folder}".split())
    args.world_size = 2
    timers = SimpleNamespace()
    return Run(args=args, rank=rank, device=torch.device("cpu"), timers=timers, iteration=7)


def test_only_the_last_rank_opens_a_run_and_logs_by_iteration(
    wandb: _Recorded, tmp_path: Path
) -> None:
    folder = tmp_path / "not" / "there"
    Writers(_run(folder, rank=0)).close()
    assert not wandb.opened
    run = _run(folder, rank=1)
    writers = Writers(run)
    writers.add("lm loss", 2.5, samples=True)
    writers.close()
    writers.close()
    assert wandb.opened["project"] == "p"
    assert wandb.opened["name"] == "try"
    assert wandb.opened["dir"] == str(folder)
    assert folder.is_dir()
    assert wandb.opened["config"]["num_layers"] == "2"
    assert wandb.logged == [({"lm loss": 2.5}, 7)]
    assert wandb.finished == 1


def test_a_run_that_cannot_be_opened_is_a_plain_error(wandb: _Recorded, tmp_path: Path) -> None:
    wandb.refusal = "no API key"
    with pytest.raises(DataError, match=r"--wandb-project p: .*no API key.*WANDB_MODE=offline"):
        Writers(_run(tmp_path, rank=1))


def test_without_the_package_the_flag_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name)
    )
    with pytest.raises(ConfigError, match=r"--wandb-project p: .*pip install wandb"):
        validate(parse_args(FLAGS.split()), world_size=1)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_leaves_its_values_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*FLAGS.split(), "--wandb-save-dir", str(tmp_path)]
    (finished,) = wait(start(REPOSITORY / "pretrain_gpt.py", 1, words), timeout=150)
    assert finished.returncode == 0, finished.output[-4000:]
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for name in (b"learning-rate", b"lm loss", b"lm loss validation", b"grad-norm", b"num_layers"):
        assert name in written
