"""The memory budget of one rank: the sizes of microbatches, the activations held, the safe rule.

Sizes are integers (tokens, for instance), so that what is held returns to exactly 0.
``docs/policies.md`` has the rule and its proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule.actions import Geometry, Kind
from megatron.dpp.schedule.reference import Reference

UNIT = 1 << 40
"""Size of a microbatch where sizes do not matter: fine enough for any share of an activation."""
ROUNDING = 1e-6
"""Tolerance of a cap in chunk activations: caps are products of fractions."""


@dataclass(frozen=True)
class MemoryLimit:
    """A bound on what a rank holds, beside its cap.

    Args:
        cap: most that may be held, in chunk activations of the largest microbatch.
        weights: the activation of each chunk, in chunk activations; empty where all are 1.
        assumed: size of a microbatch whose size is not known; 0 for the largest.
        soft: Megatron's next forward may pass the limit while no weight gradient is deferred. Such
            a limit may be as low as one likes.
        deferred: weight gradients keep their share; otherwise ``B`` frees all.
        unlike: microbatches differ in size, as far as is known.
    """

    cap: float
    weights: tuple[float, ...] = ()
    assumed: int = 0
    soft: bool = False
    deferred: bool = True
    unlike: bool = False


class Budget:
    """The sizes of one iteration's microbatches on one rank, and the sum of what is held.

    Args:
        reference: Megatron's order of the rank.
        cap: most that may be held, in chunk activations of the largest microbatch.
        largest: size of the largest microbatch.
        deferred: share of an activation that its deferred weight gradients keep. A chunk's part
            above one activation (the LM head's logits) is not deferred.
        weights, assumed, soft: see :class:`MemoryLimit`.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        cap: float,
        largest: int = UNIT,
        deferred: float = 1.0,
        weights: Sequence[float] = (),
        assumed: int = 0,
        soft: bool = False,
    ) -> None:
        self.cap, self.largest, self.soft = cap, largest, soft
        self.limit = math.floor((cap + ROUNDING) * largest)
        self.in_flight = self.kept = self.peak = 0
        chunks = range(len(reference.places[Kind.F]))
        self._weights = tuple(weights) or (1,) * len(chunks)
        self._deferred = [deferred / max(self._weights[chunk], 1.0) for chunk in chunks]
        self._places, self._order = reference.places, reference.order
        first = [self._sized(chunk, assumed or largest) for chunk in chunks]
        self._steps = [
            sign * first[action.chunk]
            for action, sign in zip(reference.order, reference.signs, strict=True)
        ]
        self.unrun = sum(step for step in self._steps if step > 0)
        self.smallest = min(first)

    def _sized(self, chunk: int, size: int) -> int:
        """The size of chunk ``chunk``'s activation of such a microbatch, rounded down."""
        weight = self._weights[chunk]
        return size if weight == 1 else int(weight * size)

    @property
    def least(self) -> float:
        """The least cap under which Megatron's order of these sizes fits, in chunk activations."""
        return max(itertools.accumulate(self._steps)) / self.largest

    def fits(self, place: int, after: Sequence[int]) -> bool:
        """The forward at ``place`` of Megatron's order fits, and so does the rest of that order
        after it.

        The walk visits the unrun tasks that precede this one in Megatron's order: none while the
        rank follows that order, a few otherwise.

        Args:
            after: the next unrun place of each place; the last entry is the first unrun place.
        """
        limit, steps = self.limit, self._steps
        if self.soft and place == after[-1] and not self.kept:
            return True
        held = self.in_flight + steps[place]
        if held + self.kept > limit:
            return False
        if self.in_flight + self.unrun <= limit:  # all that is left fits
            return True
        at = after[-1]
        while at != place:
            held += steps[at]
            if held > limit:
                return False
            at = after[at]
        return True

    def forward(self, place: int) -> None:
        """Count the forward at ``place`` as run."""
        size = self._steps[place]
        self.unrun -= size
        self.in_flight += size
        held = self.in_flight + self.kept
        if held > self.peak:
            self.peak = held

    def backward(self, place: int, pieces: int) -> int:
        """Count the backward at ``place`` as run; returns what its weight gradients keep, if there
        are ``pieces`` of them.
        """
        size = -self._steps[place]
        self.in_flight -= size
        if not pieces:
            return 0
        kept = math.ceil(self._deferred[self._order[place].chunk] * size)
        self.kept += kept
        return kept

    def weight(self, kept: int, left: int, pieces: int) -> None:
        """Count one of the ``left`` weight gradients of a backward as run, which kept ``kept`` for
        all ``pieces``. What they keep is rounded up, and 0 without them.
        """
        self.kept += -kept * left // pieces - -kept * (left - 1) // pieces

    def learn(self, microbatch: int, size: int, forwards_run: Sequence[int]) -> None:
        """Replace the assumed size of a microbatch, none of whose backwards has run here."""
        steps = self._steps
        for chunk, run in enumerate(forwards_run):
            place = self._places[Kind.F][chunk][microbatch]
            held = self._sized(chunk, size)
            less = steps[place] - held
            if microbatch < run:
                self.in_flight -= less
            else:
                self.unrun -= less
            steps[place] = held
            steps[self._places[Kind.B][chunk][microbatch]] = -held
            if held < self.smallest:
                self.smallest = held


def key_sizes(groups: Sequence[int], sizes: Sequence[int], kappa: float) -> dict[int, int]:
    """The memory of each group's keys, values and gradients, under its first microbatch, whose
    activation lives as long. Microbatches that are linked to no other keep none.

    Args:
        groups: as in :class:`Geometry`; empty for none.
        sizes: of the microbatches.
        kappa: what they hold, as a share of their microbatches' activations.
    """
    found: dict[int, int] = {}
    first = 0
    for number in groups if sizes else ():
        if number > 1:
            found[first] = math.ceil(kappa * sum(sizes[first : first + number]))
        first += number
    return found


def group_sizes(groups: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Sizes of the microbatches of :attr:`Geometry.uncut`: of each group."""
    if not groups:
        return list(sizes)
    left = iter(sizes)
    return [sum(itertools.islice(left, number)) for number in groups]


class KnownSizes:
    """The sizes of one iteration's microbatches as far as they are known, checked.

    Args:
        largest: no microbatch may be larger.
    """

    def __init__(self, geometry: Geometry, largest: int) -> None:
        self._rank, self.largest = geometry.rank, largest
        self.known: list[int | None] = [None] * geometry.num_microbatches

    def learn(self, microbatch: int, size: int) -> bool:
        """Note a size; True if it was not known before.

        Raises:
            ScheduleError: there is no such microbatch, it is larger than the largest, or it was
                given another size before.
        """
        what = f"pipeline rank {self._rank}: microbatch {microbatch} has size {size}"
        if not 0 <= microbatch < len(self.known):
            raise ScheduleError(f"{what}, but there are microbatches 0 .. {len(self.known) - 1}")
        if not 0 <= size <= self.largest:
            raise ScheduleError(
                f"{what}; the memory cap was set for sizes from 0 to {self.largest}"
            )
        before = self.known[microbatch]
        if before is not None and before != size:
            raise ScheduleError(f"{what}, but had size {before} before")
        self.known[microbatch] = size
        return before is None

    def __getitem__(self, microbatch: int) -> int:
        """Size of a microbatch; the largest where it is not known."""
        size = self.known[microbatch]
        return self.largest if size is None else size

    def unlike(self) -> list[int] | None:
        """All sizes, or None if every microbatch counts as the largest."""
        sizes = [self[microbatch] for microbatch in range(len(self.known))]
        return sizes if min(sizes) < self.largest else None
