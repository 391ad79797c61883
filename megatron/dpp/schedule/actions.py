"""Actions, and the geometry of the pipeline that they belong to.

An :class:`Action` is one task of one rank; a schedule is a list of them. Actions print and parse as
text (``1F3`` is chunk 1, forward, microbatch 3) and pack into one integer for shared memory.
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ScheduleError


class Kind(enum.IntEnum):
    """Kind of a task."""

    F = 0
    """Forward of one chunk for one microbatch."""
    B = 1
    """Backward for the input gradient; with a fused backward, for the weight gradients too."""
    W = 2
    """Backward for (a piece of) the weight gradients, deferred from its ``B``."""


DIRECTION_OF = {Kind.F: Direction.FORWARD, Kind.B: Direction.BACKWARD}
"""The direction of a task's input, and of its result."""

_NOTATION = re.compile(r"(\d+)([FBW])(\d+)(?:\.(\d+))?")
_PIECE_BITS, _MICROBATCH_BITS, _CHUNK_BITS = 16, 24, 16


class Action(NamedTuple):
    """One task of one rank. ``piece`` numbers the pieces of a ``W``; it is 0 for ``F`` and ``B``.

    >>> str(Action(Kind.F, 1, 3)), str(Action(Kind.W, 0, 12, 2))
    ('1F3', '0W12.2')
    """

    kind: Kind
    chunk: int
    microbatch: int
    piece: int = 0

    def __str__(self) -> str:
        piece = f".{self.piece}" if self.piece else ""
        return f"{self.chunk}{Kind(self.kind).name}{self.microbatch}{piece}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` printed; any other text raises a :class:`ScheduleError`."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: expected chunk, F, B or W, microbatch, and for a W an "
                "optional piece, as in 1F3 or 0W2.1"
            )
        chunk, kind, microbatch, piece = match.groups()
        return cls(Kind[kind], int(chunk), int(microbatch), int(piece or 0))

    def word(self) -> int:
        """Pack the action into one integer from 1 to below 2**63."""
        word = int(self.kind) + 1
        word = word << _CHUNK_BITS | self.chunk
        word = word << _MICROBATCH_BITS | self.microbatch
        return word << _PIECE_BITS | self.piece

    @classmethod
    def from_word(cls, word: int) -> Action:
        """Unpack what :meth:`word` packed; any other integer raises a :class:`ScheduleError`."""
        piece = word & (1 << _PIECE_BITS) - 1
        microbatch = word >> _PIECE_BITS & (1 << _MICROBATCH_BITS) - 1
        chunk = word >> _PIECE_BITS + _MICROBATCH_BITS & (1 << _CHUNK_BITS) - 1
        kind = (word >> _PIECE_BITS + _MICROBATCH_BITS + _CHUNK_BITS) - 1
        if kind not in (0, 1, 2):
            raise ScheduleError(f"{word:#x} is not a packed action: its kind is {kind}, not 0 .. 2")
        return cls(Kind(kind), chunk, microbatch, piece)


@dataclass(frozen=True)
class Geometry:
    """The shape of one iteration as one rank sees it. Virtual stage ``s`` is
    ``chunk * num_ranks + rank``, as in Megatron.

    Args:
        num_ranks: pipeline ranks, ``p``.
        rank: this pipeline rank, ``0 .. p-1``.
        num_chunks: model chunks (virtual stages) of each rank, ``v``.
        num_microbatches: microbatches of this iteration, ``m``; at least 1.
        forward_only: evaluation; there are no backwards.
        group: Megatron's ``microbatch_group_size_per_vp_stage``; ``None`` is ``num_ranks``. It has
            no effect with one chunk.
        w_pieces: pieces of each chunk's ``W`` with a split backward; ``None`` is one each. A chunk
            with 0 pieces defers nothing.
        groups: numbers of consecutive microbatches that attention links, such as the slices of one
            sequence; empty (as it is stored, too, where all are 1) where none is linked. The
            forwards of a group run in order, its backwards in reverse order after all of them.

    Raises:
        ConfigError: a number is out of range.
    """

    num_ranks: int
    rank: int
    num_chunks: int
    num_microbatches: int
    forward_only: bool = False
    group: int | None = None
    w_pieces: tuple[int, ...] | None = None
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_chunks", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"pipeline rank {self.rank}: must be in 0 .. {self.num_ranks - 1}")
        if self.num_chunks > 1 and self.group is not None and self.group < self.num_ranks:
            raise ConfigError(
                f"microbatch_group_size_per_vp_stage={self.group!r}: must be at least the number "
                f"of pipeline ranks, {self.num_ranks}"
            )
        pieces, v = self.w_pieces, self.num_chunks
        if pieces is not None and (len(pieces) != v or min(pieces) < 0):
            raise ConfigError(f"w_pieces {pieces}: expected {v} numbers, none below 0")
        if self.groups and (min(self.groups) < 1 or sum(self.groups) != self.num_microbatches):
            raise ConfigError(
                f"groups {self.groups}: expected numbers of at least 1 with the sum "
                f"{self.num_microbatches}, the number of microbatches"
            )
        if all(number == 1 for number in self.groups):
            object.__setattr__(self, "groups", ())

    @property
    def uncut(self) -> Geometry:
        """The iteration in which each group is one microbatch."""
        if not self.groups:
            return self
        return replace(self, num_microbatches=len(self.groups), groups=())

    @functools.cached_property
    def backward_units(self) -> tuple[int, ...]:
        """The microbatches of a chunk in the order of their backwards: groups in order, each from
        its last microbatch to its first. This permutation is its own inverse.

        >>> Geometry(2, 0, 1, 6, groups=(3, 1, 2)).backward_units
        (2, 1, 0, 3, 5, 4)
        """
        ends = itertools.accumulate(self.groups or (1,) * self.num_microbatches, initial=0)
        found = itertools.pairwise(ends)
        return tuple(i for start, end in found for i in range(end - 1, start - 1, -1))

    @functools.cached_property
    def due(self) -> tuple[int, ...]:
        """``due[n]`` is the number of microbatches in the groups that the first ``n`` forwards of a
        chunk complete: backwards that these forwards allow.

        >>> Geometry(2, 0, 1, 6, groups=(3, 1, 2)).due
        (0, 0, 0, 3, 4, 4, 6)
        """
        found = [0]
        for number in self.groups or (1,) * self.num_microbatches:
            found += [found[-1]] * (number - 1) + [found[-1] + number]
        return tuple(found)

    def position(self, kind: Kind, microbatch: int) -> int:
        """Tasks of its kind that come before a microbatch's in each chunk."""
        if kind is Kind.F or not 0 <= microbatch < self.num_microbatches:
            return microbatch
        return self.backward_units[microbatch]

    @property
    def group_size(self) -> int:
        """Microbatches of a chunk that run before the next chunk's, depth first."""
        return self.num_ranks if self.group is None else self.group

    @property
    def is_first(self) -> bool:
        """This rank holds virtual stage 0 (its chunk 0), whose inputs come from the data."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """This rank holds the last virtual stage, whose gradient comes from the loss."""
        return self.rank == self.num_ranks - 1

    def pieces(self, chunk: int) -> int:
        """Pieces of the ``W`` of ``chunk`` with a split backward."""
        return 1 if self.w_pieces is None else self.w_pieces[chunk]


def groups_of(backwards: Sequence[int]) -> tuple[int, ...]:
    """The ``Geometry.groups`` under which a chunk's backwards run in this order of microbatches:
    each run of falling numbers is a group. Empty where none is linked.

    >>> groups_of(Geometry(2, 0, 1, 6, groups=(3, 1, 2)).backward_units)
    (3, 1, 2)
    >>> groups_of([0, 1, 2])
    ()
    """
    found: list[int] = []
    for before, microbatch in itertools.pairwise([-1, *backwards]):
        if microbatch < before:
            found[-1] += 1
        else:
            found.append(1)
    return tuple(found) if len(found) < len(backwards) else ()
