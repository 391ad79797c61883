"""Loaders and batches: samples of a run, agreed lengths, and what tensor-parallel ranks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import samples as data
from megatron.dpp_train.data.samples import CyclicSampler, SequentialSampler


def args_of(**changes: Any) -> Any:
    usual = {
        "train_samples": None, "train_iters": 10, "global_batch_size": 12, "micro_batch_size": 2,
        "data_parallel_size": 3, "full_validation": False, "skip_train": False, "eval_interval": 4,
        "eval_iters": 5, "dataloader_type": "single", "data_sharding": True, "num_workers": 0,
        "device": "cpu", "seed": 7, "exit_signal_handler": False,
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


@pytest.mark.parametrize(
    ("kind", "whole", "eval_iters", "expected"),
    [
        ("single", False, None, [1, 2, 3]),
        ("single", False, 1, [1, 2, 3]),
        ("cyclic", False, None, [1, 2, 3, 1, 2, 3, 1]),
        ("cyclic", False, 1, [1, 2, 3, 1, 2, 3, 1]),
        ("single", True, None, [1, 2, 3]),
        ("single", True, 1, [1, 2, 1, 2, 1, 2, 1]),
        ("cyclic", True, 1, [1, 2, 1, 2, 1, 2, 1]),
        ("cyclic", True, None, [1, 2, 3, 1, 2, 3, 1]),
    ],
)
def test_only_whole_evaluations_start_anew_and_only_cyclic_sets_repeat(
    kind: str, whole: bool, eval_iters: int | None, expected: list[int]
) -> None:
    """Twelve samples in microbatches of two on three replicas are two microbatches of each."""
    args = args_of(dataloader_type=kind, full_validation=whole)
    assert data._batches_per_evaluation(args) == 2
    assert list(islice(data._endless(args, [1, 2, 3], eval_iters), 7)) == expected


@pytest.mark.parametrize(("kind", "sharded"), [("single", True), ("cyclic", True),
                                               ("cyclic", False)])  # fmt: skip
def test_a_loader_reads_its_replicas_samples_behind_those_consumed(
    monkeypatch: pytest.MonkeyPatch, kind: str, sharded: bool
) -> None:
    groups = SimpleNamespace(
        get_data_parallel_rank=lambda: 1, get_data_parallel_world_size=lambda: 3
    )
    monkeypatch.setattr(data, "mpu", groups)
    args = args_of(dataloader_type=kind, data_sharding=sharded)
    loader = data._loader(args, list(range(24)), 6)
    sampler: Any = (SequentialSampler if kind == "single" else CyclicSampler)(
        24, 6, 2, 1, 3, sharded=sharded
    )
    assert [batch.tolist() for batch in loader] == list(sampler) != []
    assert data._loader(args, None, 0) is None
    assert data._loader(args, [], 0) is None, "an evaluation of no iterations"


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_outlive_an_epoch(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Else every epoch, and every whole evaluation, would fork its workers anew."""
    ranks = SimpleNamespace(
        get_data_parallel_rank=lambda: 0, get_data_parallel_world_size=lambda: 1
    )
    monkeypatch.setattr(data, "mpu", ranks)
    loader = data._loader(args_of(num_workers=workers), list(range(8)), 0)
    assert (loader.num_workers, loader.persistent_workers) == (workers, workers > 0)


def agreed(loaders: list[list[Any]], most: list[int], **changes: Any) -> tuple[Any, list[str]]:
    """The result of a rank, beside one that has ``most``."""
    said: list[str] = []
    run: Any = SimpleNamespace(args=args_of(data_path=["x"], **changes), say=said.append)
    given: list[list[int]] = []

    def largest(values: list[int]) -> list[int]:
        given.append(list(values))
        return [max(pair) for pair in zip(values, most, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "largest", largest)
        return (*data._agree(run, loaders), given[0]), said


def test_ranks_that_read_nothing_learn_the_length_of_a_whole_validation() -> None:
    sets: list[list[Any]] = [[[1], [1] * 9, None], [None, [1] * 7, None]]
    found, said = agreed(sets, [0, 0, 1, 0], full_validation=True)
    assert found == ([True, True, True], 4, [1, 1, 0, 4]) and not said
    found, said = agreed([[None] * 3], [1, 1, 0, 4], full_validation=True)
    assert found == ([True, True, False], 4, [0, 0, 0, 0])
    assert said == ["no test set: it is not evaluated"]
    found, _ = agreed([[[1], [1], None]], [0] * 4, full_validation=True)
    assert found[1] == 1, "less than one iteration"
    found, _ = agreed(sets, [0] * 4)
    assert found == ([True, True, False], 5, [1, 1, 0, 0]), "--eval-iters"
    with pytest.raises(DataError, match="data x: no training set"):
        agreed([[None, [1], None]], [0] * 4)
    agreed([[None, [1], None]], [0] * 4, skip_train=True)


@pytest.mark.parametrize(
    ("kind", "chunks", "all_read", "drawn"),
    [("single", 1, True, 2), ("single", 2, True, 4), ("single", 3, False, 4),
     ("cyclic", 2, True, 2), ("cyclic", 1, True, 1)],
)  # fmt: skip
def test_generators_advance_as_in_megatron_lm(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunks: int, all_read: bool, drawn: int
) -> None:
    """Once per loader of a chunk that reads, also on ranks that have none."""
    monkeypatch.setattr(data, "_chunk_loaders", lambda *_: [None] * 3)
    monkeypatch.setattr(data, "_agree", lambda *_: ([True, False, True], 0))
    monkeypatch.setattr(data, "ends", lambda stage: (stage in (None, 0), stage in (None, 2)))
    run: Any = SimpleNamespace(args=args_of(dataloader_type=kind))
    task: Any = SimpleNamespace(every_stage_reads=all_read)
    torch.manual_seed(3)
    found = data.build_iterators(run, chunks, task)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    for _ in range(drawn):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), state)
    assert found.train == (None if chunks == 1 else [None] * chunks)
    assert (found.has_valid, found.has_test) == (False, True)


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("plain", 24), ("plain", 7), ("plain", 0)]),
        ({"skip_train": True}, [None, ("plain", 0), ("plain", 0)]),
        ({"full_validation": True}, [("plain", 24), ("plain", 0), ("plain", 0)]),
        ({"variable_lengths": True}, [("rows", 24), ("judged", 7), ("judged", 0)]),
    ],
)
@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_each_set_goes_on_behind_its_own_samples(
    changes: dict[str, Any], expected: list[Any], tensor_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first tensor-parallel rank reads; where lengths are unlike, all know them."""
    args = args_of(**{"variable_lengths": False} | changes)
    run: Any = SimpleNamespace(args=args, consumed_train_samples=24, consumed_valid_samples=7)
    groups = SimpleNamespace(get_tensor_model_parallel_rank=lambda: tensor_rank)
    monkeypatch.setattr(data, "mpu", groups)
    asked: list[tuple[Any, ...]] = []

    class Builder:
        def __init__(self, kind: Any, sizes: list[Any], built_here: Any, config: Any) -> None:
            asked.append((kind, sizes, built_here(), config))

        def build(self) -> tuple[str, str, str]:
            return "train", "valid", "test"

    def rows(args: Any, samples: str, consumed: int, *, reads: bool, plain: bool = False) -> Any:
        assert reads is (tensor_rank == 0)
        return samples, "judged" if plain else "rows", consumed

    monkeypatch.setattr(data, "BlendedMegatronDatasetBuilder", Builder)
    monkeypatch.setattr(
        data, "_loader", lambda args, samples, consumed: (samples, "plain", consumed)
    )
    monkeypatch.setattr(data, "sequence_loader", rows)
    task: Any = SimpleNamespace(datasets=lambda run: ("kind", "config"), every_stage_reads=True)
    found = data._chunk_loaders(run, task, None)
    names = ("train", "valid", "test")
    assert found == [one and (n, *one) for n, one in zip(names, expected, strict=True)]
    built = tensor_rank == 0 or args.variable_lengths
    assert asked == [("kind", list(data.num_samples(args)), built, "config")]
