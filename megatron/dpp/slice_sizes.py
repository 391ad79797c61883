"""Tokens of the slices into which a long sequence is cut; the same rule for a run and its estimate.

The schedule, the planner of batches, the simulator and the estimate of a run call it.
"""

from __future__ import annotations

import math

LEAST_TOKENS = 2048
"""Smallest slice of ``auto`` where no measurement says otherwise."""
MOST_TOKENS = 4096
"""Largest slice of ``auto``: longer ones leave more of the pipeline waiting."""
UNITS_PER_RANK = 6
"""Slices for each pipeline rank that ``auto`` aims at."""
WHOLE_UP_TO = 1.5
"""A sequence of up to so many slices' tokens is not cut."""
ROUNDING = 64
"""A slice has a multiple of so many tokens, as kernels like it."""


def auto_tokens(total: int, num_ranks: int, *, least: int = LEAST_TOKENS, multiple: int = 1) -> int:
    """Tokens of a slice for a replica's batch of ``total`` tokens: about six units per rank.

    Args:
        least: smallest slice that pays, by the overhead of a task.
        multiple: ranks that share a sequence.
    """
    step = math.lcm(ROUNDING, multiple)
    wanted = max(least, min(MOST_TOKENS, total // (UNITS_PER_RANK * num_ranks)))
    return -(-wanted // step) * step


def sizes_to_weigh(total: int, num_ranks: int, *, least: int, multiple: int = 1) -> list[int]:
    """Tokens of the slices that ``auto`` weighs, the largest first; arguments are those of
    :func:`auto_tokens`: its largest and its smallest ones, and those of some six units per rank.
    """
    totals = (0, total, UNITS_PER_RANK * num_ranks * MOST_TOKENS)
    found = {auto_tokens(each, num_ranks, least=least, multiple=multiple) for each in totals}
    return sorted(found, reverse=True)


def slice_size(length: int, tokens: int, multiple: int = 1) -> int:
    """Tokens of each slice of a sequence but the last one; ``length`` where it is not cut.

    Slices have equal tokens. The last one has half of a slice at least, unless the others would
    have more than 1.5 times ``tokens`` then.

    Args:
        tokens: that a slice should have. Sequences of up to 1.5 times as many are not cut.
        multiple: of which every slice but the last is one.

    >>> slice_size(10000, 4096), slice_size(6000, 4096)
    (3392, 6000)
    """
    if length <= WHOLE_UP_TO * tokens:
        return length
    step = math.lcm(min(ROUNDING, tokens), multiple)
    each = math.ceil(length / math.ceil(length / tokens) / step) * step
    while 0 < length % each < each / 2 and each + step <= WHOLE_UP_TO * tokens:
        each += step
    return min(each, length)
