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


def slice_tokens(
    asked: str, length: int, batch_tokens: int, num_ranks: int, multiple: int
) -> int | None:
    """Tokens of the slices of a sequence; None if it is not cut.

    Args:
        asked: a number of tokens, or ``auto``: some 6 units per rank, from 2,048 to 4,096 tokens.
        length: tokens of the sequence.
        batch_tokens: tokens of a replica's step.
        num_ranks: pipeline size.
        multiple: of which every slice is a multiple.

    >>> slice_tokens("4096", 10000, 80000, 4, 1), slice_tokens("4096", 6000, 80000, 4, 1)
    (3392, None)
    """
    wanted = auto_tokens(batch_tokens, num_ranks) if asked == "auto" else int(asked)
    if length <= WHOLE_UP_TO * wanted:
        return None
    step = math.lcm(min(ROUNDING, wanted), multiple)
    each = math.ceil(length / math.ceil(length / wanted) / step) * step
    while 0 < length % each < each / 2:
        each += step
    return each if each < length else None
