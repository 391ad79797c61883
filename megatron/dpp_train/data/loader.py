"""Documents of unlike length as rows of microbatches: plans of global batches, and a loader that
gives Megatron's loop this replica's microbatches.

A plan depends on lengths and settings alone: every rank computes the same one without a message,
and a resumed run computes it again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data.documents import Sample

KINDS = ("padded", "as-they-are", "packed")
"""Rows of a microbatch: of the longest length, of the longest of its documents, or one row of all
its documents."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Settings of a plan, equal on all ranks but for ``replica``.

    Args:
        kind: a name of :data:`KINDS`.
        num_replicas: data-parallel size.
        replica: number of this data-parallel rank.
        micro_batch_size: documents of a microbatch; of a packed row on average.
        longest: most tokens of a document.
        document_multiple: tokens that documents of a packed row are padded to a multiple of.
        row_multiple: likewise of rows.
        hidden_size: of the model, for the cost of attention.
    """

    kind: str
    num_replicas: int = 1
    replica: int = 0
    micro_batch_size: int = 1
    longest: int
    document_multiple: int = 1
    row_multiple: int = 1
    hidden_size: int = 1024

    def bounds(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """First tokens of the documents of a row with their padding, and the row's end; of a kind
        that is not packed, of any of its rows."""
        if self.kind != "packed":
            widest = self.longest if self.kind == "padded" else max(lengths)
            return 0, _up(widest, self.row_multiple)
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + _up(length, self.document_multiple))
        return (*ends[:-1], _up(ends[-1], self.row_multiple))

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of a microbatch with padding."""
        rows = 1 if self.kind == "packed" else len(lengths)
        return rows * self.bounds(lengths)[-1]

    def cost(self, lengths: Sequence[int]) -> float:
        """Relative time of a microbatch: linear layers, and causal attention of each document."""
        return sum(length + length**2 / (12 * self.hidden_size) for length in lengths)


def share(lengths: Sequence[int], settings: BatchSettings) -> list[list[int]]:
    """The microbatches of this replica, as indices into the global batch, in their drawn order.

    Raises:
        ConfigError: the documents do not fill the microbatches of all replicas.
    """
    size, replicas = settings.micro_batch_size, settings.num_replicas
    count, rest = divmod(len(lengths), size * replicas)
    if rest or not count:
        raise ConfigError(
            f"--global-batch-size {len(lengths)} with --micro-batch-size {size} on {replicas} "
            f"replicas: expected a multiple of {size * replicas}"
        )
    rows = [list(range(first, first + size)) for first in range(0, len(lengths), size)]
    if settings.kind == "packed" and size > 1:
        costs = [settings.cost([length]) for length in lengths]
        room = [_up(length, settings.document_multiple) for length in lengths]
        rows = spread(costs, len(rows), sizes=room, capacity=size * settings.longest) or rows
    costs = [settings.cost([lengths[i] for i in row]) for row in rows]
    mine = spread(costs, replicas, sizes=[1] * len(rows), capacity=count)
    assert mine is not None  # equal counts always fit
    return [rows[i] for i in mine[settings.replica]]


def spread(
    costs: Sequence[float], bins: int, *, sizes: Sequence[int], capacity: int
) -> list[list[int]] | None:
    """Items in ``bins`` of like cost: the costliest first, into the cheapest bin with room.

    Args:
        sizes: what each item takes of a bin's ``capacity``.

    Returns:
        The items of each bin, ascending, the bins by their first item; None where they do not fit.
    """
    loads = [(0.0, number) for number in range(bins)]
    room = [capacity] * bins
    found: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        passed = []
        while loads and room[loads[0][1]] < sizes[item]:
            passed.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = heapq.heappop(loads)
        found[number].append(item)
        room[number] -= sizes[item]
        for entry in (*passed, (load + costs[item], number)):
            heapq.heappush(loads, entry)
    return sorted(sorted(each) for each in found)


def _up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


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
