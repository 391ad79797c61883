"""Evaluations that all ranks must agree on: of sets that are not there, and of whole sets."""

from __future__ import annotations

import pytest

from tests.loop.several import train_each
from tests.parity.runs import Result

EVALUATING = "--train-iters 2 --eval-iters 2 --eval-interval 1"
FULL = f"{EVALUATING} --full-validation --split 12,1,1"
"""Sets of 17 samples: no number of whole batches."""
CONSTANT = f"{FULL} --lr 0 --min-lr 0"
RUNS = {
    "all": f"{EVALUATING}",
    "no-test": f"{EVALUATING} --split 9,1,0 --pipeline-model-parallel-size 2",
    "dynamic": f"{EVALUATING} --split 9,1,0 --pipeline-model-parallel-size 2 --use-dpp",
    "training-alone": f"{EVALUATING} --split 1,0,0 --tensor-model-parallel-size 2",
    "full": f"{FULL} --tensor-model-parallel-size 2",
    "fours": CONSTANT,
    "twos": f"{CONSTANT} --global-batch-size 2",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return train_each(tmp_path_factory.mktemp("evaluation"), 2, RUNS)


def test_sets_that_are_not_there_are_not_evaluated(runs: dict[str, Result]) -> None:
    evaluated = {name: [row["set"] for row in runs[name].evaluations] for name in runs}
    assert evaluated["all"] == ["validation"] * 3 + ["test"]
    assert evaluated["no-test"] == ["validation"] * 3
    assert evaluated["training-alone"] == []


def test_a_full_validation_is_as_long_on_ranks_that_read_nothing(runs: dict[str, Result]) -> None:
    assert [row["set"] for row in runs["full"].evaluations] == ["validation"] * 3 + ["test"]


def losses(run: Result) -> list[float]:
    return [row["lm loss"] for row in run.evaluations]


def test_a_dynamic_evaluation_has_the_losses_of_a_static_one(runs: dict[str, Result]) -> None:
    """Of other samples each time, by a model that has learnt meanwhile."""
    assert losses(runs["dynamic"]) == losses(runs["no-test"])
    assert runs["dynamic"].column("lm loss") == runs["no-test"].column("lm loss")
    assert len({*losses(runs["dynamic"])}) == 3


def test_a_full_validation_is_of_all_samples_each_time(runs: dict[str, Result]) -> None:
    """From the first on, and each counts once: the size of the batches makes no difference."""
    before, last, again, _ = losses(runs["full"])
    assert before > last == again
    for name in ("fours", "twos"):
        assert len({*losses(runs[name])[:3]}) == 1, "the model is always the same"
    expected = losses(runs["fours"])
    assert losses(runs["twos"]) == pytest.approx(expected, rel=1e-6)
