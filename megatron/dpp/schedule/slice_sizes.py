"""Tokens of the slices into which a long sequence is cut, alike in a run and in its estimate."""

from __future__ import annotations

import math

WHOLE_UP_TO = 1.5
"""A sequence of up to so many slices' tokens is not cut."""
_ROUNDING = 64
"""A slice has a multiple of so many tokens, as kernels like it."""


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
    step = math.lcm(min(_ROUNDING, tokens), multiple)
    each = math.ceil(length / math.ceil(length / tokens) / step) * step
    while 0 < length % each < each / 2 and each + step <= WHOLE_UP_TO * tokens:
        each += step
    return min(each, length)
