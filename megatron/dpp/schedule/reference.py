"""Megatron's own order of forwards and backwards on a rank, to which a dynamic rank can always
return.

It is the order of megatron-core 0.16.1 (``get_schedule_table`` and ``get_pp_rank_microbatches`` in
``pipeline_parallel/schedules.py``): warm-up forwards, then forward and backward in turn, then the
remaining backwards. For a number of microbatches that megatron-core refuses, it is the order of the
next number that it accepts, without the surplus microbatches. Leaving out whole microbatches keeps
an order free of deadlocks and adds no memory.
"""

from __future__ import annotations

import dataclasses
import functools
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
    p, v = geometry.num_ranks, geometry.num_chunks
    behind = p - 1 - geometry.rank
    warmup = behind if v == 1 else 2 * behind + (v - 1) * geometry.group_size
    return min(warmup, padded_microbatches(geometry) * v)


def reference_order(geometry: Geometry) -> list[Action]:
    """Megatron's order of every ``F`` and ``B`` of this rank (only ``F`` when ``forward_only``).

    >>> print(*reference_order(Geometry(num_ranks=2, rank=0, num_chunks=1, num_microbatches=3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    v, padded = geometry.num_chunks, padded_microbatches(geometry)
    table = schedule_table(padded, v, geometry.group_size)
    forwards = [Action(Kind.F, chunk, i) for chunk, i in table]
    if geometry.forward_only:
        order = forwards
    else:
        backwards = [Action(Kind.B, v - 1 - chunk, i) for chunk, i in table]
        warmup = num_warmup(geometry)
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += (forward, backward)
        order += backwards[len(forwards) - warmup :]
    return [action for action in order if action.microbatch < geometry.num_microbatches]


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
        peak_size(_order_of(dataclasses.replace(bare, rank=rank)), sizes)
        for rank in range(geometry.num_ranks)
    )


@functools.lru_cache(maxsize=256)
def _order_of(geometry: Geometry) -> list[Action]:
    return reference_order(geometry)


class Reference:
    """Megatron's order of one rank, indexed. Immutable: all iterations of a shape share it."""

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
