"""Iterators over loaders: those of a chunk, which end with the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch.utils.data

from megatron.dpp.train import data

ARGS = argparse.Namespace(
    dataloader_type="single", full_validation=False, skip_train=False, eval_iters=0
)


@pytest.fixture
def iterators(monkeypatch: pytest.MonkeyPatch) -> data.Iterators:
    """Of four samples, one and none, in batches of two; what is left over is dropped."""

    class Builder:
        def __init__(self, *_: Any) -> None:
            pass

        def build(self) -> Sequence[Any]:
            return [10, 11, 12, 13], [20], None

    def loader(args: argparse.Namespace, samples: Any, consumed: int) -> Any:
        dropping = {"batch_size": 2, "drop_last": True}
        return None if samples is None else torch.utils.data.DataLoader(samples, **dropping)

    monkeypatch.setattr(data, "BlendedMegatronDatasetBuilder", Builder)
    monkeypatch.setattr(data, "num_samples", lambda args: (4, 1, 0))
    monkeypatch.setattr(data, "_loader", loader)
    run = argparse.Namespace(args=ARGS, consumed_train_samples=0, consumed_valid_samples=0)
    task = argparse.Namespace(datasets=lambda run: (None, None))
    return data.build_iterators(run, 1, task)


def test_samples_that_fill_no_batch_are_none(iterators: data.Iterators) -> None:
    assert next(iterators.train).tolist() == [10, 11]
    assert list(iterators.valid) == []
    assert iterators.test is None


def test_closed_iterators_have_let_their_loaders_go(iterators: data.Iterators) -> None:
    iterators.close()
    assert list(iterators.train) == []
    iterators.close()
