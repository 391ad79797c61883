"""Planning of a global batch of sequences of unlike length: replicas, microbatches, their order.

All functions are pure and return indices into what they are given. Costs are any unit of time, for
instance those of :meth:`megatron.dpp.sim.lengths.LengthCosts.time`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron.dpp.errors import ConfigError

PACKINGS = ("none", "in-order", "ffd", "even")
"""Ways to put sequences into microbatches; see :func:`pack`."""


def balance(costs: Sequence[float], num_replicas: int) -> list[list[int]]:
    """The sequences of each replica, in their drawn order: longest processing time first, and
    counts that differ by one at most.

    Raises:
        ConfigError: there are fewer sequences than replicas.
    """
    if not 1 <= num_replicas <= len(costs):
        raise ConfigError(f"{len(costs)} sequences cannot be shared by {num_replicas} replicas")
    share, more = divmod(len(costs), num_replicas)
    loads = [(0.0, replica) for replica in range(num_replicas)]
    given: list[list[int]] = [[] for _ in range(num_replicas)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, replica = heapq.heappop(loads)
        given[replica].append(index)
        full = len(given[replica])
        if full == share + 1:
            more -= 1
        if full < share or (full == share and more > 0):
            heapq.heappush(loads, (load + costs[index], replica))
        if more == 0:  # those that wait at ``share`` sequences are full, too
            loads = [entry for entry in loads if len(given[entry[1]]) < share]
            heapq.heapify(loads)
    return [sorted(indices) for indices in given]


def pack(
    lengths: Sequence[int],
    budget: int,
    how: str,
    *,
    costs: Sequence[float] | None = None,
    num_bins: int = 0,
) -> list[list[int]]:
    """The sequences of each microbatch.

    Args:
        lengths: in tokens.
        budget: most tokens of a microbatch.
        how: ``none`` (one each), ``in-order`` (a microbatch closes when the next sequence does not
            fit), ``ffd`` (first fit decreasing), or ``even`` (the costliest sequence first, into
            the cheapest of ``num_bins`` microbatches that has room).
        costs: of the sequences, for ``even``; ``None`` takes the lengths.

    Raises:
        ConfigError: a sequence is longer than the budget, ``num_bins`` microbatches are too few or
            more than there are sequences, or ``how`` is unknown.
    """
    if max(lengths, default=0) > budget:
        raise ConfigError(f"a sequence of {max(lengths)} tokens exceeds the budget of {budget}")
    if how == "none":
        return [[index] for index in range(len(lengths))]
    if how == "in-order":
        return _in_order(lengths, budget)
    if how == "ffd":
        return _first_fit(lengths, budget)
    if how == "even":
        return _even(lengths, budget, lengths if costs is None else costs, num_bins)
    raise ConfigError(f"packing {how}: expected one of {', '.join(PACKINGS)}")


def _in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = budget
        bins[-1].append(index)
        room -= length
    return bins


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, room in enumerate(rooms) if lengths[index] <= room), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(budget)
        bins[place].append(index)
        rooms[place] -= lengths[index]
    return bins


def _even(
    lengths: Sequence[int], budget: int, costs: Sequence[float], num_bins: int
) -> list[list[int]]:
    if not 1 <= num_bins <= len(lengths):
        raise ConfigError(f"{len(lengths)} sequences cannot fill {num_bins} microbatches")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads, rooms = [0.0] * num_bins, [budget] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        fitting = [b for b in range(num_bins) if lengths[index] <= rooms[b]]
        if not fitting:
            raise ConfigError(
                f"{num_bins} microbatches of {budget} tokens do not hold {sum(lengths)} tokens in "
                f"{len(lengths)} sequences; give more microbatches"
            )
        place = min(fitting, key=lambda b: (loads[b], len(bins[b])))
        bins[place].append(index)
        loads[place] += costs[index]
        rooms[place] -= lengths[index]
    return bins


def orders(costs: Sequence[float], num_ranks: int) -> dict[str, list[int]]:
    """The named orders of microbatches of these costs, ``drawn`` first."""
    ascending = sorted(range(len(costs)), key=lambda i: costs[i])
    first = ascending[: 2 * num_ranks]
    return {
        "drawn": list(range(len(costs))),
        "ascending": ascending,
        "small-big-small": ascending[::2] + ascending[1::2][::-1],
        "small, then descending": first + ascending[2 * num_ranks :][::-1],
    }
