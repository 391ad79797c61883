"""The loader of rows: microbatches of this replica, one after the other, for Megatron's loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.batches import BatchSettings, share
from megatron.dpp_train.data.documents import Sample


@dataclass(frozen=True)
class Row:
    """One microbatch.

    Args:
        lengths: tokens of its documents, without padding.
        bounds: first tokens of the documents of a packed row with their padding, and its end;
            otherwise 0 and the end of each row.
        num_rows: rows of the microbatch.
        tensors: [num_rows, s] by name; None on ranks that read none.
    """

    lengths: tuple[int, ...]
    bounds: tuple[int, ...]
    num_rows: int
    tensors: dict[str, torch.Tensor] | None = None

    def part(self, ranks: int, rank: int) -> torch.Tensor | slice:
        """The places of a context-parallel rank in a row: of each document the chunks ``rank`` and
        ``2 * ranks - 1 - rank`` of ``2 * ranks``, as megatron-core cuts them."""
        if ranks == 1:
            return slice(None)
        places = []
        for begin, end in itertools.pairwise(self.bounds):
            size = (end - begin) // (2 * ranks)
            for chunk in (rank, 2 * ranks - 1 - rank):
                places.append(torch.arange(begin + chunk * size, begin + (chunk + 1) * size))
        return torch.cat(places)

    def padding(self) -> torch.Tensor:
        """True for padding, bool [num_rows, s]."""
        found = torch.ones(self.num_rows, self.bounds[-1], dtype=torch.bool)
        for number, length in enumerate(self.lengths):
            row, begin = (number, 0) if self.num_rows > 1 else (0, self.bounds[number])
            found[row, begin : begin + length] = False
        return found


class RowLoader:
    """An iterator over the microbatches of one replica.

    Args:
        dataset: a :class:`~megatron.dpp_train.data.documents.DocumentDataset`, or a blend of them.
        settings: of the plans.
        batch_size: documents of the next global batch.
        consumed: documents that the run has taken before.
        reads: give tensors; otherwise lengths alone.
        announce: is told the tokens of each microbatch of the next step, as soon as the last one of
            this step is taken.
    """

    def __init__(
        self,
        dataset: Any,
        settings: BatchSettings,
        batch_size: Callable[[], int],
        consumed: int,
        *,
        reads: bool,
        announce: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._dataset, self._settings, self._batch_size = dataset, settings, batch_size
        self._reads, self._announce, self._first = reads, announce, consumed
        self._coming: list[list[int]] = []
        self._lengths: dict[int, int] = {}
        self._tell()

    @classmethod
    def of(cls, dataset: Any, *given: Any, **more: Any) -> RowLoader | None:
        """A loader, None for a split without documents."""
        return cls(dataset, *given, **more) if dataset is not None and len(dataset) else None

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if not self._coming:
            self._plan()
        numbers = self._coming.pop(0)
        lengths = tuple(self._lengths[number] for number in numbers)
        rows = 1 if self._settings.kind == "packed" else len(lengths)
        row = Row(lengths, self._settings.bounds(lengths), rows)
        if self._reads:
            samples = [self._dataset[number] for number in numbers]
            row = replace(row, tensors=collate(samples, row))
        if not self._coming:
            self._tell()
        return row

    def _plan(self) -> None:
        """Choose the samples of each microbatch of the next step.

        Raises:
            DataError: too few documents are left.
        """
        size = self._batch_size()
        numbers = range(self._first, self._first + size)
        if numbers.stop > len(self._dataset):
            raise DataError(
                f"--data-path: {max(0, len(self._dataset) - self._first)} of {size} documents are "
                "left for a step; lower --train-iters, or add data"
            )
        self._lengths = {number: length_of(self._dataset, number) for number in numbers}
        rows = share(list(self._lengths.values()), self._settings)
        self._coming = [[numbers[i] for i in row] for row in rows]
        self._first = numbers.stop

    def _tell(self) -> None:
        """Announce the next step, unless the data ends before it."""
        if self._announce is None or self._first + self._batch_size() > len(self._dataset):
            return
        self._plan()
        rows = ([self._lengths[number] for number in row] for row in self._coming)
        self._announce([self._settings.tokens(row) for row in rows])


def length_of(dataset: Any, number: int) -> int:
    """Tokens of a sample of a data set of documents, or of a blend of them."""
    if isinstance(dataset, BlendedDataset):
        of, place = dataset.dataset_index[number], dataset.dataset_sample_index[number]
        return length_of(dataset.datasets[of], place)
    return int(dataset.length(number))


def collate(samples: Sequence[Sample], row: Row) -> dict[str, torch.Tensor]:
    """The tensors of a microbatch; tokens beyond a document are padding without a loss.

    Padding keeps the last position of its document, as a table of positions may have none to go on.
    """
    shape = row.num_rows, row.bounds[-1]
    batch: dict[str, Any] = {
        name: np.zeros(shape, dtype=np.int64) for name in ("tokens", "labels", "position_ids")
    }
    batch["loss_mask"] = np.zeros(shape, dtype=np.float32)
    for number, sample in enumerate(samples):
        at, begin = (number, 0) if row.num_rows > 1 else (0, row.bounds[number])
        stop = row.bounds[-1] if row.num_rows > 1 else row.bounds[number + 1]
        size = len(sample["mask"])
        batch["tokens"][at, begin : begin + size] = sample["tokens"][:-1]
        batch["labels"][at, begin : begin + size] = sample["tokens"][1:]
        batch["loss_mask"][at, begin : begin + size] = sample["mask"]
        batch["position_ids"][at, begin:stop] = np.minimum(np.arange(stop - begin), size - 1)
    return {name: torch.from_numpy(values) for name, values in batch.items()}
