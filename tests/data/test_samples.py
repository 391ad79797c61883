"""Iterators of a rank's chunks: what each reads, from where, and what all ranks agree on."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import samples as data
from megatron.dpp_train.data.samples import CyclicSampler, SequentialSampler
from megatron.dpp_train.exits import prepare_worker

Sets = Sequence[Any]
"""Training, validation and test."""


CONFIG = SimpleNamespace(fast_cache_load=True)


class Batches(list[Any]):
    """A loader whose batches are given, and how it was made."""

    def __init__(self, batches: Any, **options: Any) -> None:
        super().__init__(batches)
        self.options = options


class Rank:
    """A rank that builds its iterators over data sets that are given.

    Args:
        sets: of each chunk; of batches of loaders, unless ``real``.
        most: what the largest of any other rank is, where ranks agree.
        real: PyTorch's loaders read the samples.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *sets: Sets, most: Sequence[int] = (0, 0, 0, 0),
        real: bool = False, tensor_rank: int = 0, replica: tuple[int, int] = (0, 3),
        all_read: bool = True, consumed: tuple[int, int] = (0, 0), **changes: Any,
    ) -> None:  # fmt: skip
        usual = {
            "train_samples": None, "train_iters": 10, "global_batch_size": 12,
            "micro_batch_size": 2, "data_parallel_size": 3, "full_validation": False,
            "skip_train": False, "eval_interval": 4, "eval_iters": 5, "dataloader_type": "single",
            "data_sharding": True, "num_workers": 0, "device": "cpu", "seed": 7,
            "exit_signal_handler": False, "mmap_bin_files": True,
            "variable_lengths": False, "data_path": ["tokens"],
        }  # fmt: skip
        self.args: Any = argparse.Namespace(**usual | changes)
        self.said: list[str] = []
        self.given: list[list[int]] = []
        self.built: list[Any] = []
        self.loaders: list[Batches] = []
        to_build = iter(sets)

        class Builder:
            def __init__(_, kind: Any, sizes: Any, built_here: Any, config: Any) -> None:
                self.built.append((kind, sizes, built_here(), config))

            def build(_) -> Sets:
                return next(to_build)

        def largest(values: list[int]) -> list[int]:
            self.given.append(list(values))
            return [max(pair) for pair in zip(values, most, strict=True)]

        def loader(_: Any, batches: Any, **options: Any) -> Batches:
            self.loaders.append(Batches(batches, **options))
            return self.loaders[-1]

        ranks = SimpleNamespace(
            get_data_parallel_rank=lambda: replica[0],
            get_data_parallel_world_size=lambda: replica[1],
            get_tensor_model_parallel_rank=lambda: tensor_rank,
        )
        monkeypatch.setattr(data, "mpu", ranks)
        monkeypatch.setattr(data, "ends", lambda stage: (stage in (None, 0), stage in (None, 2)))
        monkeypatch.setattr(data, "BlendedMegatronDatasetBuilder", Builder)
        monkeypatch.setattr(data, "largest", largest)
        if not real:
            monkeypatch.setattr(data, "Loader", loader)
            for kind in ("SequentialSampler", "CyclicSampler"):
                monkeypatch.setattr(
                    data, kind, lambda total, consumed, *_, **__: SimpleNamespace(consumed=consumed)
                )
        self.run: Any = SimpleNamespace(
            args=self.args, consumed_train_samples=consumed[0], consumed_valid_samples=consumed[1],
            iteration=0, say=self.said.append,
        )  # fmt: skip
        task: Any = SimpleNamespace(
            datasets=lambda run: ("kind", CONFIG), every_stage_reads=all_read
        )
        self.build: Callable[[], data.Iterators] = lambda: data.build_iterators(
            self.run, len(sets), task
        )


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(
    ("whole", "size", "expected"),
    [(False, 3, [0, 1, 2]), (True, 3, [0, 1] * 4), (True, 5, [0, 1, 2, 3] * 2)],
)
def test_only_whole_evaluations_start_anew_and_only_cyclic_sets_repeat(
    kind: str, whole: bool, size: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve samples in microbatches of two on three replicas are two microbatches of each. A whole
    evaluation begins anew after all of its iterations."""
    batches = [*range(size)]
    rank = Rank(monkeypatch, (batches, batches, None), dataloader_type=kind, full_validation=whole)
    found = rank.build()
    assert found.eval_iters == (size // 2 if whole else 5)
    repeated = batches * 2 if kind == "cyclic" else batches
    assert list(islice(found.train, len(repeated))) == repeated
    assert len(list(islice(found.train, 1))) == (kind == "cyclic")
    expected = expected if whole else repeated
    assert list(islice(found.valid, len(expected))) == expected
    assert len(list(islice(found.valid, 1))) == (whole or kind == "cyclic")


@pytest.mark.parametrize(("kind", "sharded"), [("single", True), ("cyclic", True),
                                               ("cyclic", False)])  # fmt: skip
def test_a_loader_reads_its_replicas_samples_behind_those_consumed(
    monkeypatch: pytest.MonkeyPatch, kind: str, sharded: bool
) -> None:
    rank = Rank(
        monkeypatch, (list(range(24)), None, []), real=True, replica=(1, 3), consumed=(6, 0),
        dataloader_type=kind, data_sharding=sharded,
    )  # fmt: skip
    found = rank.build()
    sampler: Any = (SequentialSampler if kind == "single" else CyclicSampler)(
        24, 6, 2, 1, 3, sharded=sharded
    )
    expected = list(sampler)
    assert [batch.tolist() for batch in islice(found.train, len(expected))] == expected != []
    assert found.valid is None
    assert found.test is None, "an evaluation of no iterations"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("outlives", [True, False])
def test_workers_outlive_an_epoch_and_are_prepared(
    workers: int, outlives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every epoch, and every whole evaluation, would fork its workers anew."""
    made: list[Any] = []
    kind = data.Loader

    def loader(*given: Any, **more: Any) -> Any:
        made.append(kind(*given, **more))
        return made[-1]

    monkeypatch.setattr(data, "Loader", loader)
    rank = Rank(
        monkeypatch, ([1] * 12, None, None), real=True, num_workers=workers,
        exit_signal_handler=outlives, mmap_bin_files=True, distributed_timeout_minutes=10.0,
    )  # fmt: skip
    rank.build()
    (found,) = made
    assert (found.num_workers, found.persistent_workers) == (workers, workers > 0)
    assert found.worker_init_fn.func is prepare_worker
    assert found.worker_init_fn.keywords == {"outlives_sigterm": outlives}


def test_samples_that_fill_no_batch_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(
        monkeypatch, ([10, 11, 12, 13], [20], None), real=True, replica=(0, 1), data_parallel_size=1
    )
    found = rank.build()
    assert next(found.train).tolist() == [10, 11]
    assert list(found.valid) == []
    assert found.test is None
    found.close()
    assert list(found.train) == [], "a closed one has let its loader go"
    found.close()


AGREED = [
    ({"full_validation": True}, (0, 0, 1, 0), (True, True, 4), [1, 1, 0, 4]),
    ({}, (0, 0, 0, 0), (True, False, 5), [1, 1, 0, 0]),
]


@pytest.mark.parametrize(("changes", "most", "expected", "given"), AGREED)
def test_ranks_agree_on_the_sets_of_all_chunks(
    changes: dict[str, Any], most: tuple[int, ...], expected: tuple[Any, ...], given: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An evaluation of the whole validation set has the iterations of its longest loader."""
    sets: list[Sets] = [([1], [1] * 9, None), (None, [1] * 7, None)]
    rank = Rank(monkeypatch, *sets, most=most, **changes)
    found = rank.build()
    assert (found.has_valid, found.has_test, found.eval_iters) == expected
    assert rank.given == [given]
    assert rank.said == ["no test set: it is not evaluated"] * (not expected[1])


def test_ranks_that_read_nothing_learn_the_length_of_a_whole_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch, (None, None, None), most=(1, 1, 0, 4), full_validation=True)
    found = rank.build()
    assert (found.has_valid, found.has_test, found.eval_iters) == (True, False, 4)
    assert rank.given == [[0, 0, 0, 0]] and rank.said == ["no test set: it is not evaluated"]
    short = Rank(monkeypatch, ([1], [1], None), full_validation=True).build()
    assert short.eval_iters == 1, "less than one iteration"
    none = Rank(monkeypatch, ([1], None, None), full_validation=True, eval_iters=0)
    assert none.build().eval_iters == 0 and not none.said


def test_a_missing_training_set_is_refused_unless_the_run_trains_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DataError, match="data tokens: no training set; give it a share in --split"):
        Rank(monkeypatch, (None, [20], [30])).build()
    found = Rank(monkeypatch, ([1], [20], None), consumed=(9, 0), skip_train=True).build()
    assert found.train is None and found.has_valid


@pytest.mark.parametrize(
    ("kind", "chunks", "all_read", "drawn"),
    [("single", 1, True, 2), ("single", 2, True, 4), ("single", 3, False, 4),
     ("cyclic", 2, True, 2), ("cyclic", 1, True, 1)],
)  # fmt: skip
def test_generators_advance_as_in_megatron_lm(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunks: int, all_read: bool, drawn: int
) -> None:
    """Once per loader of a chunk that reads, also on ranks that have none."""
    rank = Rank(
        monkeypatch, *[(None, None, None)] * chunks, most=(1, 0, 1, 0), all_read=all_read,
        dataloader_type=kind,
    )  # fmt: skip
    torch.manual_seed(3)
    found = rank.build()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    for _ in range(drawn):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), state)
    assert found.train == (None if chunks == 1 else [None] * chunks)
    assert (found.has_valid, found.has_test) == (False, True)


class Rows(Batches):
    """A loader of sequences."""

    plans: Any = None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [24, 7, 0]),
        ({"skip_train": True}, [None, 0, 0]),
        ({"full_validation": True}, [24, 0, 0]),
        ({"variable_lengths": True}, [24, 7, 0]),
    ],
)
@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_each_set_goes_on_behind_its_own_samples(
    changes: dict[str, Any], expected: list[Any], tensor_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first tensor-parallel rank builds and reads; where lengths are unlike, all know
    them, and evaluations are plain."""
    names = ("train", "valid", "test")
    found: dict[str, Any] = {}

    def rows(args: Any, samples: Any, consumed: int, *, reads: bool, plain: bool = False) -> Any:
        assert reads is (tensor_rank == 0) and plain is (samples != ["train"])
        found[samples[0]] = consumed
        return Rows(samples)

    monkeypatch.setattr(data, "sequence_loader", rows)
    rank = Rank(
        monkeypatch, [[name] for name in names], tensor_rank=tensor_rank, consumed=(24, 7),
        **changes,
    )  # fmt: skip
    rank.build()
    for made in rank.loaders:
        found[made[0]] = made.options["batch_sampler"].consumed
    assert [found.get(name) for name in names] == expected
    assert bool(rank.loaders) is not rank.args.variable_lengths
    built = tensor_rank == 0 or rank.args.variable_lengths
    assert rank.built == [("kind", list(data.num_samples(rank.args)), built, CONFIG)]


def test_chunks_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk had a planner of its own, and one of them was ended."""
    made: list[Rows] = []

    def rows(*_: Any, **__: Any) -> Rows:
        made.append(Rows([1]))
        made[-1].plans = object()
        return made[-1]

    monkeypatch.setattr(data, "sequence_loader", rows)
    found = Rank(monkeypatch, *[([1], None, None)] * 3, variable_lengths=True).build()
    assert {id(each.plans) for each in made[::3]} == {id(found.plans)}
