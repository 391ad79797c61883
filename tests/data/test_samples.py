"""Iterators over loaders: those of a chunk, which end with the run."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import samples as data

ARGS = argparse.Namespace(
    dataloader_type="single", full_validation=False, skip_train=False, eval_iters=1,
    data_path=["tokens"], variable_lengths=False,
)  # fmt: skip


class Builder:
    """Of four samples, one and none."""

    def __init__(self, *_: Any) -> None:
        pass

    def build(self) -> Sequence[Any]:
        return [10, 11, 12, 13], [20], None


def build(
    monkeypatch: pytest.MonkeyPatch, consumed: int = 0, **changes: Any
) -> tuple[data.Iterators, list[str]]:
    """Iterators over batches of two, without a last incomplete one, and the printed lines."""

    def loader(args: argparse.Namespace, samples: Any, consumed: int) -> Any:
        if samples is None:
            return None
        assert consumed < len(samples)
        return torch.utils.data.DataLoader(samples, batch_size=2, drop_last=True)

    monkeypatch.setattr(data, "BlendedMegatronDatasetBuilder", Builder)
    monkeypatch.setattr(data, "num_samples", lambda args: (4, 1, 0))
    monkeypatch.setattr(data, "_loader", loader)
    monkeypatch.setattr(data, "largest", lambda values: values)
    said: list[str] = []
    args = argparse.Namespace(**{**vars(ARGS), **changes})
    run = argparse.Namespace(
        args=args, consumed_train_samples=consumed, consumed_valid_samples=0, say=said.append
    )
    task = argparse.Namespace(datasets=lambda run: (None, None), every_stage_reads=True)
    return data.build_iterators(run, 1, task), said


@pytest.fixture
def iterators(monkeypatch: pytest.MonkeyPatch) -> data.Iterators:
    return build(monkeypatch)[0]


def test_samples_that_fill_no_batch_are_none(iterators: data.Iterators) -> None:
    assert next(iterators.train).tolist() == [10, 11]
    assert list(iterators.valid) == []
    assert iterators.test is None


def test_closed_iterators_have_let_their_loaders_go(iterators: data.Iterators) -> None:
    iterators.close()
    assert list(iterators.train) == []
    iterators.close()


def test_a_set_that_is_not_there_is_said_and_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    iterators, said = build(monkeypatch)
    assert iterators.has_valid and not iterators.has_test
    assert said == ["no test set: it is not evaluated"]
    assert build(monkeypatch, eval_iters=0)[1] == []


def test_a_missing_training_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "build", lambda self: (None, [20], [30]))
    with pytest.raises(DataError, match="data tokens: no training set; give it a share in --split"):
        build(monkeypatch)


def test_a_finished_run_is_evaluated_without_its_training_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterators, _ = build(monkeypatch, consumed=4, skip_train=True)
    assert iterators.train is None and iterators.has_valid


def test_chunks_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk had a planner of its own, and one of them was ended."""

    class Loader(list[int]):
        def __init__(self) -> None:
            super().__init__([1])
            self.plans = object()

    loaders = [[Loader(), None, None] for _ in range(3)]
    monkeypatch.setattr(data, "_chunk_loaders", lambda run, task, stage: loaders[stage])
    monkeypatch.setattr(data, "largest", lambda values: values)
    run = argparse.Namespace(args=ARGS, say=lambda line: None)
    task = argparse.Namespace(every_stage_reads=True)
    found = data.build_iterators(run, 3, task)  # type: ignore[arg-type]
    assert {id(each[0].plans) for each in loaders} == {id(found.plans)}


@pytest.mark.parametrize("loader_type", ["single", "cyclic"])
def test_a_full_validation_begins_anew_after_all_of_its_iterations(loader_type: str) -> None:
    args: Any = argparse.Namespace(
        full_validation=True, dataloader_type=loader_type, global_batch_size=8,
        micro_batch_size=2, data_parallel_size=2,
    )  # fmt: skip
    found = data._endless(args, list(range(5)), eval_iters=2)
    assert list(itertools.islice(found, 9)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_full_validation_leaves_the_training_set_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of one batch that begins anew, and a training set of two."""
    sizes = {"global_batch_size": 2, "micro_batch_size": 2, "data_parallel_size": 1}
    iterators, _ = build(monkeypatch, full_validation=True, **sizes)
    assert iterators.eval_iters == 1
    read = [batch.tolist() for batch in itertools.islice(iterators.train, 3)]
    assert read == [[10, 11], [12, 13]]


def test_a_full_validation_without_its_set_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "largest", lambda values: values)
    args = argparse.Namespace(full_validation=True, skip_train=False, eval_iters=0)
    run: Any = SimpleNamespace(args=args, say=print)
    assert data._agree(run, [[["a batch"], None, None]]) == ([True, False, False], 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (80, 24, 8)),  # after iterations 4 and 8, and at the end
        ({"eval_interval": None}, (80, 8, 8)),
        ({"skip_train": True}, (80, 8, 8)),
        ({"full_validation": True}, (80, None, 8)),
        ({"eval_iters": 0}, (80, 1, 1)),
        ({"train_samples": 99}, (99, 24, 8)),
    ],
)
def test_evaluations_have_samples_for_each_of_them(changes: Any, expected: Any) -> None:
    usual = {
        "global_batch_size": 8, "train_samples": None, "train_iters": 10, "full_validation": False,
        "skip_train": False, "eval_interval": 4, "eval_iters": 1,
    }  # fmt: skip
    args: Any = argparse.Namespace(**usual | changes)
    assert data.num_samples(args) == expected
