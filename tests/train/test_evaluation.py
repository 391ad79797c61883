"""Evaluations that all ranks must agree on: of sets that are not there, and of whole sets."""

from __future__ import annotations

import pytest

from tests.parity.runs import Result
from tests.train.several import train_each

EVALUATING = "--train-iters 2 --eval-iters 2 --eval-interval 1"
RUNS = {
    "all": f"{EVALUATING}",
    "no-test": f"{EVALUATING} --split 9,1,0 --pipeline-model-parallel-size 2",
    "training-alone": f"{EVALUATING} --split 1,0,0 --tensor-model-parallel-size 2",
    "full": f"{EVALUATING} --full-validation --tensor-model-parallel-size 2",
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
