"""Megatron-LM's two samplers: the samples of a data-parallel rank and their order.

Both resume in the middle of the data from the count of consumed samples that checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.dpp.errors import DataError


class SequentialSampler:
    """Samples in order: a replica takes its slice of each ``micro_batch_size * num_replicas``
    consecutive ones. A last, incomplete batch is dropped."""

    def __init__(
        self, total: int, consumed: int, micro_batch_size: int, replica: int, num_replicas: int
    ) -> None:
        if consumed >= total:
            raise DataError(
                f"no samples left: {consumed} of {total} are consumed; "
                "lower --train-iters or add data"
            )
        self._range = range(consumed, total)
        self._stride = micro_batch_size * num_replicas
        self._offset = replica * micro_batch_size
        self._size = micro_batch_size

    def __len__(self) -> int:
        return len(self._range) // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            start = batch * self._stride + self._offset
            yield list(self._range[start : start + self._size])


class CyclicSampler:
    """Samples without end, shuffled anew in every epoch with its number as the seed.

    With ``sharded`` each replica shuffles its own contiguous share, else all shuffle the whole.
    """

    def __init__(
        self,
        total: int,
        consumed: int,
        micro_batch_size: int,
        replica: int,
        num_replicas: int,
        sharded: bool = True,
    ) -> None:
        self._total, self._consumed, self._size = total, consumed, micro_batch_size
        self._replica, self._num_replicas, self._sharded = replica, num_replicas, sharded
        self._stride = micro_batch_size * num_replicas
        if total < self._stride:
            raise DataError(f"{total} samples do not fill one batch of {self._stride}")

    def __len__(self) -> int:
        return self._total // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        active = self._total - self._total % self._stride
        epoch, offset = divmod(self._consumed, active)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self._sharded:
            share = (self._total // self._stride) * self._size
            order = torch.randperm(share, generator=generator).tolist()
            start = self._replica * share
            indices = [start + i for i in order[offset // self._num_replicas :]]
        else:
            whole = self._total // self._size * self._size
            order = torch.randperm(whole, generator=generator).tolist()
            indices = order[offset:][self._replica :: self._num_replicas]
        for start in range(0, len(indices) - self._size + 1, self._size):
            self._consumed += self._stride
            yield indices[start : start + self._size]
