"""Megatron's own order of forwards and backwards on a rank, to which a dynamic rank can always
return.

It is the order of megatron-core 0.16.1 (``get_schedule_table`` and ``get_pp_rank_microbatches`` in
``pipeline_parallel/schedules.py``): warm-up forwards, then forward and backward in turn, then the
remaining backwards. For a number of microbatches that megatron-core refuses, it is the order of the
next number that it accepts, without the surplus microbatches. Leaving out whole microbatches keeps
an order free of deadlocks and adds no memory.

Where microbatches are linked (``Geometry.groups``), backwards of a group run in reverse order and
forwards lead by as many more as they need. ``docs/policies.md`` proves that these orders end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from megatron.dpp.schedule.actions import Action, Geometry, Kind


def padded_microbatches(geometry: Geometry) -> int:
    """The least number of microbatches, from ``geometry``'s own up, that megatron-core's
    interleaved schedule accepts: at least one whole group, and a remainder of 0 or at least
    ``num_ranks``.
    """
    num, group = geometry.num_microbatches, geometry.group_size
    if geometry.num_chunks == 1:
        return num
    if num < group:
        return group
    remainder = num % group
    return num if remainder == 0 else num + max(0, geometry.num_ranks - remainder)


def schedule_table(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    """``(chunk, microbatch)`` in depth-first order: each group of microbatches runs through chunk
    0, then chunk 1, ...
    """
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


def num_warmup(geometry: Geometry) -> int:
    """Warm-up forwards: those before the first pair of a forward and a backward."""
    total = padded_microbatches(geometry) * geometry.num_chunks
    lead = next(iter(_leads(geometry)), total + 1)
    return min(lead - 1, total)


def reference_order(geometry: Geometry) -> list[Action]:
    """Megatron's order of every ``F`` and ``B`` of this rank (only ``F`` when ``forward_only``).

    >>> print(*reference_order(Geometry(num_ranks=2, rank=0, num_chunks=1, num_microbatches=3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    v, padded = geometry.num_chunks, padded_microbatches(geometry)
    table = schedule_table(padded, v, geometry.group_size)
    forwards = [Action(Kind.F, chunk, i) for chunk, i in table]
    order, num_run = [], 0
    if not geometry.forward_only:
        units = (*geometry.backward_units, *range(geometry.num_microbatches, padded))
        leads = itertools.chain(_leads(geometry), itertools.repeat(len(forwards)))
        for (chunk, position), lead in zip(table, leads, strict=False):
            order += forwards[num_run:lead]
            num_run = max(num_run, lead)
            order.append(Action(Kind.B, v - 1 - chunk, units[position]))
    order += forwards[num_run:]
    return [action for action in order if action.microbatch < geometry.num_microbatches]


def _leads(geometry: Geometry) -> list[int]:
    """Forwards that have run before each backward, but for the last ones: there all have.

    Megatron's warm-up tells those of the last rank. With linked microbatches its backward needs
    those of its whole group, and the number grows by one at most from a backward to the next. A
    rank before it runs as many as the last rank does ``q`` backwards later, with several chunks
    ``2 q``, if it is ``q`` ranks before.
    """
    v, size, padded = geometry.num_chunks, geometry.group_size, padded_microbatches(geometry)
    table = schedule_table(padded, v, size)
    found = [place + 1 + (v - 1) * size for place in range(len(table))]
    if geometry.groups:
        place_of = {entry: place for place, entry in enumerate(table)}
        numbers = (*geometry.groups, *[1] * (padded - geometry.num_microbatches))
        ends = zip(itertools.accumulate(numbers), numbers, strict=True)
        last = [end - 1 for end, number in ends for _ in range(number)]
        most = 0
        for place, (chunk, position) in enumerate(table):
            most = max(most, place_of[v - 1 - chunk, last[position]] + 1)
            found[place] = max(found[place], most)
        for place in range(len(found) - 2, -1, -1):
            found[place] = max(found[place], found[place + 1] - 1)
    behind = geometry.num_ranks - 1 - geometry.rank
    return found[behind if v == 1 else 2 * behind :]


def peak_in_flight(geometry: Geometry) -> int:
    """Peak of :func:`reference_order` on this rank in chunk activations (``I_r``); 0 when
    ``forward_only``.
    """
    if geometry.forward_only:
        return 0
    return peak_size(reference_order(geometry), [1] * geometry.num_microbatches)


def peak_size(order: Sequence[Action], sizes: Sequence[int], weights: Sequence[float] = ()) -> int:
    """Peak of ``order`` if each activation of microbatch ``i`` has ``sizes[i]`` (``R_r``), times
    its chunk's weight if there are ``weights``.
    """
    held = peak = 0
    for action in order:
        size = sizes[action.microbatch]
        size = int(weights[action.chunk] * size) if weights else size
        held += size if action.kind is Kind.F else -size
        peak = max(peak, held)
    return peak


def static_peak(geometry: Geometry, sizes: Sequence[int]) -> int:
    """The most that Megatron's own order of these microbatches holds on any rank
    (``max_r R_r``).
    """
    bare = dataclasses.replace(geometry, w_pieces=None)
    return max(
        peak_size(Reference.of(dataclasses.replace(bare, rank=rank)).order, sizes)
        for rank in range(geometry.num_ranks)
    )


class Reference:
    """Megatron's order of one rank, indexed. Immutable: all iterations of a shape share it."""

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(geometry: Geometry) -> Reference:
        """That of a geometry, made once."""
        return Reference(geometry)

    def __init__(self, geometry: Geometry) -> None:
        v, m, g = geometry.num_chunks, geometry.num_microbatches, geometry.group_size
        self.order = reference_order(geometry)
        self.signs = [1 if action.kind is Kind.F else -1 for action in self.order]
        self.places = [[[-1] * m for _ in range(v)] for _ in (Kind.F, Kind.B)]
        for place, action in enumerate(self.order):
            self.places[action.kind][action.chunk][action.microbatch] = place
        # Depth-first index of the i-th forward of chunk c: ((i // g) * v + c) * g + i % g;
        # backwards mirror c.
        self.depth_first = [[(i // g * v + c) * g + i % g for i in range(m)] for c in range(v)]
