"""Planning of slices: which sequences of a batch are cut, which share a row, and their order.

A *row* is what one group of units runs: a sequence that is cut into slices, or several short
sequences that are packed into one unit. All functions are pure and depend on lengths and settings
alone, so every rank computes the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import HOLDS_ALL, Kind
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.packing import orders, pack
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.slice_sizes import LEAST_TOKENS, ROUNDING, WHOLE_UP_TO, auto_tokens, slice_size


@dataclass(frozen=True)
class Row:
    """One row of tokens.

    Args:
        sequences: indices of its sequences in the batch.
        lengths: of these, in tokens, in the row's order.
        ends: last token + 1 of each slice; a single one where the row is not cut.
    """

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    ends: tuple[int, ...]

    @functools.cached_property
    def units(self) -> list[Piece]:
        """The tokens of each unit, in the order of forwards. Attention leaves no sequence."""
        stops = list(itertools.accumulate(self.lengths))
        each = list(zip(stops, self.lengths, strict=True))
        found = []
        for begin, end in itertools.pairwise((0, *self.ends)):
            squares = 0
            for stop, length in each:
                start = stop - length
                if stop > begin and start < end:
                    squares += (min(stop, end) - start) ** 2 - max(begin - start, 0) ** 2
            found.append(Piece(begin, end, squares))
        return found


class Piece(NamedTuple):
    """The tokens ``[begin, end)`` of a row, and the squares that attention costs there."""

    begin: int
    end: int
    squares: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


def check_slice_tokens(tokens: int, multiple: int = 1) -> None:
    """Refuse slices that cannot be.

    Raises:
        ConfigError: ``tokens`` is not positive, or no multiple of 64 and of ``multiple``.
    """
    step = math.lcm(ROUNDING, multiple)
    if tokens < 1 or tokens % step:
        raise ConfigError(
            f"slices of {tokens} tokens: expected a multiple of {step} (of {ROUNDING}, and of the "
            f"ranks that share a sequence, {multiple})"
        )


def cut(
    lengths: Sequence[int],
    tokens: int,
    costs: LengthCosts,
    *,
    multiple: int = 1,
    packs: bool = True,
    drawn: bool = False,
) -> list[Row]:
    """The rows of a batch, the costliest first.

    A sequence of more than 1.5 slices is cut as :func:`slice_size` says.
    Shorter ones are packed by equal cost into rows of up to 1.5 slices.

    Args:
        lengths: of the sequences.
        tokens: most tokens of a slice.
        multiple: ranks that share a sequence.
        packs: short sequences share rows; otherwise each has its own.
        drawn: keep rows in the order of their first sequences.

    Raises:
        ConfigError: ``tokens`` is not a multiple that a slice can have.
    """
    check_slice_tokens(tokens, multiple)
    room = int(WHOLE_UP_TO * tokens)
    found = [
        Row((index,), (length,), _ends(length, tokens, multiple))
        for index, length in enumerate(lengths)
        if length > room
    ]
    short = [index for index, length in enumerate(lengths) if length <= room]
    bins = _packed(lengths, short, tokens, room, costs) if packs else [[index] for index in short]
    found += [
        Row(tuple(each), own, (sum(own),))
        for each in bins
        for own in [tuple(lengths[i] for i in each)]
    ]
    if drawn:
        return sorted(found, key=lambda row: row.sequences)
    return sorted(found, key=lambda row: -row_cost(row, costs))


def tokens_for(
    total: int, num_ranks: int, costs: LengthCosts, *, asked: int = 0, multiple: int = 1
) -> int:
    """Most tokens of a slice of a replica's batch of ``total`` tokens.

    Args:
        costs: of which the smallest slice that pays follows, where a task's fixed time is known.
        asked: in the place of a choice, unless 0.
        multiple: ranks that share a sequence.
    """
    least = costs.least_slice or LEAST_TOKENS
    return asked or auto_tokens(total, num_ranks, least=least, multiple=multiple)


def longest_unit(tokens: int, multiple: int = 1) -> int:
    """Most tokens of a unit, with padding, where slices have at most ``tokens``."""
    return -(-int(WHOLE_UP_TO * tokens) // multiple) * multiple


def _ends(length: int, tokens: int, multiple: int) -> tuple[int, ...]:
    size = slice_size(length, tokens, multiple)
    return (*range(size, length, size), length)


def _packed(
    lengths: Sequence[int], short: Sequence[int], tokens: int, room: int, costs: LengthCosts
) -> list[list[int]]:
    """The short sequences of each row, in their drawn order."""
    own = [lengths[i] for i in short]
    weights = [costs.total([length]) for length in own]
    for number in range(min(len(own), -(-sum(own) // tokens)), len(own) + 1 if own else 0):
        try:
            bins = pack(own, room, "even", costs=weights, num_bins=number)
        except ConfigError:
            continue  # they do not fit into so few
        return [sorted(short[i] for i in each) for each in bins]
    return []


def row_cost(row: Row, costs: LengthCosts) -> float:
    """Time of a row's units."""
    return sum(
        costs.of_work(kind, unit.tokens, unit.squares) for unit in row.units for kind in Kind
    )


def groups_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """The numbers of units of the rows, as :class:`~megatron.dpp.schedule.Geometry` takes them."""
    return tuple(len(row.ends) for row in rows)


def ordered(rows: Sequence[Row], num_ranks: int, costs: LengthCosts) -> dict[str, list[Row]]:
    """The named orders of rows, the default one first."""
    totals = [row_cost(row, costs) for row in rows]
    found = {"longest first": sorted(range(len(rows)), key=lambda i: -totals[i])}
    found |= orders(totals, num_ranks)
    return {name: [rows[i] for i in order] for name, order in found.items()}


@dataclass(frozen=True, kw_only=True)
class SlicedPipeline:
    """A pipeline that rows run through, in the simulator.

    Args:
        longest: tokens of the longest sequence, in whose activations the cap is given.
        costs: time of a rank's tasks; a chunk's take a share of it.
        overhead: time from a task's end to the next one's start at least.
        hop: time of a message, half of it on the link.
        head: time of a token in the LM head, which the last stage's F, B and W have besides. Where
            rows are cut, and with a policy that holds all activations, F has all of it: there a
            run's ``head_in_forward`` is on by default.
        schedule: policy, cap and backward.
    """

    num_ranks: int
    num_chunks: int
    longest: int
    costs: LengthCosts
    schedule: ScheduleConfig
    overhead: float = 0.0
    hop: float = 0.0
    head: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def run(self, rows: Sequence[Row]) -> Result:
        """Simulate a step with these rows in this order, in the unit of ``costs``."""
        units = [unit for row in rows for unit in row.units]
        groups, p, v = groups_of(rows), self.num_ranks, self.num_chunks
        shape = Shape(
            p, v, len(units), tuple(unit.tokens for unit in units), self.longest,
            groups if max(groups) > 1 else (),
        )  # fmt: skip
        times = [[self.costs.of_work(k, u.tokens, u.squares) / v for u in units] for k in Kind]
        head = self.head
        if shape.groups or self.schedule.policy in HOLDS_ALL:
            head = (sum(head), 0.0, 0.0)
        heads = [[head[kind] * unit.tokens for unit in units] for kind in Kind]
        forward, backward, weight = (
            [*([*row] for _ in range(p * v - 1)), [*map(operator.add, row, more)]]
            for row, more in zip(times, heads, strict=True)
        )
        links = [Hop(self.hop / 2, self.hop / 2)] * (p * v - 1)
        each = dict.fromkeys(range(p), self.overhead) if self.overhead else {}
        return self.schedule.run(shape, Costs((forward, backward, weight), links, overhead=each))

    def best(self, rows: Sequence[Row]) -> tuple[list[Row], Result]:
        """The best named order of rows, and its step."""
        tried = ordered(rows, self.num_ranks, self.costs).values()
        found = [(order, self.run(order)) for order in tried]
        return min(found, key=lambda one: one[1].makespan)
