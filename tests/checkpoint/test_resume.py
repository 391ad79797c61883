"""A resumed run goes on with the numbers of one that was not interrupted, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.several import train_each
from tests.parity.runs import Result

FP16 = "--train-iters 3 --fp16 --initial-loss-scale 524288 --hysteresis 1"  # skips two iterations
PAIRS = {
    "torch": (
        "--train-iters 3 --use-distributed-optimizer --ckpt-format torch "
        "--data-parallel-random-init"
    ),
    "ramp": (
        "--rampup-batch-size 4 4 8 --global-batch-size 8 --train-samples 16 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
    "sgd": (
        "--train-iters 3 --optimizer sgd --dataloader-type cyclic --eval-iters 1 --eval-interval 1"
    ),
    "fp16-distributed": f"--use-distributed-optimizer {FP16}",
}
MORE = {"tensor": "--train-iters 3 --tensor-model-parallel-size 2", "fp16": FP16}
"""Runs on two ranks that are saved after iteration 2, and resumed from there. That of ``ramp`` is a
step of its batch size, which saves by itself."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return _run(tmp_path_factory.mktemp("resume"), PAIRS)


def _run(folder: Path, pairs: dict[str, str]) -> dict[str, Result]:
    lines = {}
    for name, flags in pairs.items():
        interval = 100 if name == "ramp" else 2
        lines[name] = f"{flags} --save DIR/{name}.ckpt --save-interval {interval}"
        lines[f"{name}-resumed"] = f"{flags} --load DIR/{name}.ckpt --ckpt-step 2"
    return train_each(folder, 2, lines)


def _check(runs: dict[str, Result], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}-resumed"]
    for resumed_row, row in zip(resumed.iterations, whole.iterations[2:], strict=True):
        for column in ("lm loss", "grad norm"):
            assert resumed_row[column] == row[column]
    assert resumed.hashes == whole.hashes


def test_a_distributed_optimizer_in_fp32_resumes_with_the_seeds_of_its_replicas(
    runs: dict[str, Result],
) -> None:
    _check(runs, "torch")


def test_a_save_at_a_step_of_the_batch_size_has_gathered_the_parameters(
    runs: dict[str, Result],
) -> None:
    _check(runs, "ramp")


def test_momentum_resumes_and_loaders_do_not_disturb_what_dropout_draws(
    runs: dict[str, Result],
) -> None:
    _check(runs, "sgd")


def test_a_checkpoint_of_skipped_iterations_alone_resumes(runs: dict[str, Result]) -> None:
    assert runs["fp16-distributed"].column("skipped") == [1, 1, 0]
    _check(runs, "fp16-distributed")


@pytest.mark.slow
def test_without_a_distributed_optimizer_it_is_the_same(tmp_path: Path) -> None:
    runs = _run(tmp_path, MORE)
    assert runs["fp16"].column("skipped") == [1, 1, 0]
    for name in MORE:
        _check(runs, name)
