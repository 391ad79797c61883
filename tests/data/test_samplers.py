"""The samplers against a model that walks over all replicas at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.samples import CyclicSampler, SequentialSampler

LAYOUTS = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)]
"""Micro-batch sizes and numbers of replicas."""

Batches = list[list[int]]


def sequential(total: int, consumed: int, size: int, replicas: int) -> list[Batches]:
    """Batches of each replica."""
    given = [SequentialSampler(total, consumed, size, r, replicas) for r in range(replicas)]
    assert len({len(sampler) for sampler in given}) == 1
    return [list(sampler) for sampler in given]


def cyclic(total: int, size: int, replicas: int, sharded: bool, consumed: int = 0) -> list[Batches]:
    """Batches of each replica until the end of its epoch."""
    return [
        list(CyclicSampler(total, consumed, size, r, replicas, sharded=sharded))
        for r in range(replicas)
    ]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize(("size", "replicas"), LAYOUTS)
@pytest.mark.parametrize("consumed", [0, 12])
@pytest.mark.parametrize("extra", [1, 5, 12, 17])
def test_sequential_replicas_deal_samples_out_in_order(
    size: int, replicas: int, consumed: int, extra: int
) -> None:
    deck = iter(range(consumed, consumed + extra))
    expected: list[Batches] = [[] for _ in range(replicas)]
    for _ in range(extra // (size * replicas)):
        for replica in range(replicas):
            expected[replica].append(list(islice(deck, size)))
    assert sequential(consumed + extra, consumed, size, replicas) == expected


@pytest.mark.parametrize(("size", "replicas"), LAYOUTS)
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_sharded_replicas_read_every_sample_of_a_whole_batch_once(
    size: int, replicas: int, rest: int
) -> None:
    """Each replica reads its own share. Samples that fill no batch of all replicas are left out."""
    whole = 7 * size * replicas
    rest = min(rest, size * replicas - 1)
    for epoch in range(2):
        parts = cyclic(whole + rest, size, replicas, True, consumed=epoch * whole)
        read = [flat(part) for part in parts]
        share = whole // replicas
        for replica, samples in enumerate(read):
            assert sorted(samples) == list(range(replica * share, (replica + 1) * share))
        assert all(len(batch) == size for part in parts for batch in part)


@pytest.mark.parametrize(("size", "replicas"), LAYOUTS)
@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_unsharded_replicas_deal_one_shuffle_out(
    size: int, replicas: int, epoch: int, rest: int
) -> None:
    whole = 7 * size * replicas
    total = whole + min(rest, size * replicas - 1)
    generator = torch.Generator().manual_seed(epoch)
    deck = torch.randperm(total - total % size, generator=generator).tolist()
    hands: list[list[int]] = [[] for _ in range(replicas)]
    for place, sample in enumerate(deck):
        hands[place % replicas].append(sample)
    expected = [hand[: len(hand) - len(hand) % size] for hand in hands]
    parts = cyclic(total, size, replicas, False, consumed=epoch * whole)
    assert [flat(part) for part in parts] == expected
    assert all(len(batch) == size for part in parts for batch in part)
    assert len(set(flat(expected))) == len(flat(expected)) >= whole


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rest", [0, 1])
def test_every_epoch_has_an_order_of_its_own(sharded: bool, rest: int) -> None:
    """A sampler gives the same epochs as samplers that start at each of them."""
    total, size, replicas = 48 + rest, 2, 2
    for replica in range(replicas):
        sampler = CyclicSampler(total, 0, size, replica, replicas, sharded=sharded)
        epochs = [list(sampler) for _ in range(3)]
        assert len({tuple(flat(epoch)) for epoch in epochs}) == 3
        for number, epoch in enumerate(epochs):
            assert len(epoch) == len(sampler) == 12
            begun = CyclicSampler(total, number * 48, size, replica, replicas, sharded=sharded)
            assert list(begun) == epoch
            assert flat(epoch) != sorted(flat(epoch))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("batches", [1, 11, 12, 17])
def test_a_resumed_run_reads_on_into_the_next_epoch(sharded: bool, rest: int, batches: int) -> None:
    total, size, replicas = 48 + rest, 2, 2
    for replica in range(replicas):
        straight = CyclicSampler(total, 0, size, replica, replicas, sharded=sharded)
        expected = [batch for _ in range(3) for batch in straight]
        resumed = CyclicSampler(
            total, batches * size * replicas, size, replica, replicas, sharded=sharded
        )
        left = 3 - batches // 12
        assert [batch for _ in range(left) for batch in resumed] == expected[batches:]


def test_no_samples_left_is_said() -> None:
    with pytest.raises(DataError, match="8 of 8 are consumed"):
        SequentialSampler(8, 8, 1, 0, 1)


def test_samples_that_fill_no_batch_are_refused() -> None:
    with pytest.raises(DataError, match="5 samples do not fill one batch of 6"):
        CyclicSampler(5, 0, 2, 0, 3)
    assert [len(list(CyclicSampler(6, 0, 2, r, 3))) for r in range(3)] == [1, 1, 1]
