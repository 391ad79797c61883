"""Plans of global batches of documents of unlike length: microbatches and their replicas.

A plan depends on lengths and settings alone: every rank computes the same one without a message,
and a resumed run computes it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError

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
