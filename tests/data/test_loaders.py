"""Samples that a run asks for, and batches that tensor-parallel ranks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import samples as data


def args_of(**changes: Any) -> Any:
    usual = {
        "train_samples": None, "train_iters": 10, "global_batch_size": 12, "full_validation": False,
        "skip_train": False, "eval_interval": 4, "eval_iters": 5,
    }  # fmt: skip
    return argparse.Namespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (120, 3 * 5 * 12, 60)),
        ({"train_samples": 77}, (77, 180, 60)),
        ({"train_iters": 11}, (132, 180, 60)),
        ({"train_iters": 12}, (144, 4 * 60, 60)),
        ({"eval_interval": None}, (120, 60, 60)),
        ({"skip_train": True}, (120, 60, 60)),
        ({"full_validation": True}, (120, None, 60)),
        ({"eval_iters": 0}, (120, 1, 1)),
    ],
)
def test_a_run_asks_for_as_many_samples_as_it_reads(
    changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    """At least one: megatron-core takes 0 for as many as possible."""
    assert data.num_samples(args_of(**changes)) == expected


def test_the_end_of_the_data_is_said() -> None:
    samples: Iterator[int] = iter([4])
    assert data.next_of(samples) == 4
    with pytest.raises(DataError, match="the data set has ended"):
        data.next_of(samples)


@pytest.mark.parametrize(("size", "reads"), [(1, True), (2, True), (2, False)])
def test_a_batch_is_read_once_and_broadcast_to_tensor_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, reads: bool
) -> None:
    """In the order and types of the layout, on all of them alike."""
    group = SimpleNamespace(size=lambda: size)
    groups = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group,
        get_tensor_model_parallel_src_rank=lambda: 6,
    )
    sent: list[tuple[Any, ...]] = []

    def broadcast(tensor: torch.Tensor, source: int, group: Any) -> None:
        sent.append((tuple(tensor.shape), tensor.dtype, source, group))
        if not reads:
            tensor.fill_(len(sent))

    monkeypatch.setattr(data, "mpu", groups)
    monkeypatch.setattr(data.dist, "broadcast", broadcast)
    layout = {"tokens": ((2, 3), torch.int64), "mask": ((2,), torch.float32)}
    sample = {"extra": torch.zeros(1), "mask": torch.full((2,), 2, dtype=torch.int32),
              "tokens": torch.ones(2, 3, dtype=torch.int32)}  # fmt: skip
    cpu = torch.device("cpu")
    batch = data.tensor_parallel_batch(sample if reads else None, layout, cpu)
    assert list(batch) == ["tokens", "mask"]
    assert batch["tokens"].tolist() == [[1] * 3] * 2 and batch["tokens"].dtype == torch.int64
    assert batch["mask"].tolist() == [2.0, 2.0] and batch["mask"].dtype == torch.float32
    expected = [((2, 3), torch.int64, 6, group), ((2,), torch.float32, 6, group)]
    assert sent == (expected if size > 1 else [])


def test_iterators_of_all_chunks_and_the_planner_are_closed() -> None:
    samples = [data.Samples(iter([1, 2])) for _ in range(4)]
    closed: list[str] = []
    plans: Any = SimpleNamespace(close=lambda: closed.append("plans"))
    found = data.Iterators(
        [samples[0], samples[1]], [samples[2], None], [None, samples[3]], True, True, 0, plans
    )
    found.close()
    assert [list(each) for each in samples] == [[]] * 4 and closed == ["plans"]
