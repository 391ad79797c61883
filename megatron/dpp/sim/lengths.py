"""Microbatches of unlike length: drawn sequence lengths, and the costs that follow from them.

A task takes ``tokens + c * sum(length ** 2)``: causal attention grows with the square of each
sequence, the rest of a layer with the tokens.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop

_MEDIAN, _MOST_SFT, _LONG = 1000, 16384, (32768, 131072)

Microbatch = tuple[int, ...]
"""Lengths of a microbatch's sequences, in tokens."""


def sft(rng: random.Random) -> int:
    """A sequence as in supervised fine-tuning: lognormal, median 1,000 tokens, at most 16,384."""
    return max(1, min(_MOST_SFT, round(_MEDIAN * math.exp(rng.gauss(0.0, 1.0)))))


def long_mix(rng: random.Random) -> int:
    """A tenth of the sequences has 32,768 to 131,072 tokens, the others are as in :func:`sft`."""
    return rng.randint(*_LONG) if rng.random() < 0.1 else sft(rng)


def packed(rng: random.Random, number: int) -> list[Microbatch]:
    """Rows of sequences as in :func:`long_mix`, one after the other as long as a row of 131,072
    tokens has room."""
    rows: list[Microbatch] = [()]
    while len(rows) <= number:
        length = long_mix(rng)
        if sum(rows[-1]) + length > _LONG[1]:
            rows.append(())
        rows[-1] += (length,)
    return rows[:number]


@dataclass(frozen=True)
class Mix:
    """A distribution of microbatches, and the tokens of the largest."""

    draw: Callable[[random.Random, int], list[Microbatch]]
    longest: int


def _each(draw: Callable[[random.Random], int]) -> Callable[[random.Random, int], list[Microbatch]]:
    return lambda rng, number: [(draw(rng),) for _ in range(number)]


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "sft": Mix(_each(sft), _MOST_SFT),
        "long": Mix(_each(long_mix), _LONG[1]),
        "packed": Mix(packed, _LONG[1]),
    }
)
"""The named distributions."""


@dataclass(frozen=True, kw_only=True)
class LengthCosts:
    """Time of a stage's F, B and W over the lengths of a microbatch's sequences, in units of a
    token's share without attention. ``per_square`` is per kind, of the sum of the squared lengths.
    """

    per_square: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @classmethod
    def transformer(cls, hidden: int = 4096) -> LengthCosts:
        """Of a transformer layer with causal attention."""
        square = hidden / (12 * hidden * hidden)  # heads' queries, over the weights of a layer
        return cls(per_square=(square, 2.5 * square, 0.0))

    def of_work(self, kind: Kind, tokens: int, squares: int) -> float:
        """Time of one task for so many tokens, of which each pair of a query and its keys counts
        twice in ``squares``: ``end ** 2 - begin ** 2`` for a slice of a sequence.
        """
        return tokens + self.per_square[kind] * squares

    def of_works(
        self, works: Sequence[tuple[int, int]], num_ranks: int, num_chunks: int, hop: float = 0.0
    ) -> Costs:
        """Costs of equal stages, in units of a rank's forward of the mean microbatch.

        Args:
            works: tokens and squares of each microbatch.
            hop: time of a message, in chunk forwards.
        """
        mean = statistics.fmean(self.of_work(Kind.F, *work) for work in works)
        stages = num_ranks * num_chunks
        rows = [[self.of_work(kind, *work) / mean / num_chunks for work in works] for kind in Kind]
        forward, backward, weight = ([list(row) for _ in range(stages)] for row in rows)
        link = Hop(hop / num_chunks / 2, hop / num_chunks / 2)
        return Costs((forward, backward, weight), [link] * (stages - 1))


def parse_lengths(text: str) -> list[int]:
    """Lengths given as ``1000,8000,2000``.

    Raises:
        ConfigError: one of them is no positive integer.
    """
    parts = [part for part in text.replace("\n", ",").replace(" ", ",").split(",") if part]
    if not parts or any(not part.isdecimal() or int(part) < 1 for part in parts):
        raise ConfigError(f"{text[:80]!r} is not a list of lengths in tokens like 1000,8000,2000")
    return [int(part) for part in parts]
