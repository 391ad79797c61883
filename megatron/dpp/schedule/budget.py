"""The memory budget of one rank: the sizes of microbatches, the activations held, the safe rule.

Sizes are integers (tokens, for instance), so that what is held returns to exactly 0.
``docs/policies.md`` has the rule and its proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule.actions import Geometry, Kind
from megatron.dpp.schedule.reference import Reference

UNIT = 1 << 40
"""Size of a microbatch where sizes do not matter: fine enough for any share of an activation."""
ROUNDING = 1e-6
"""Tolerance of a cap in chunk activations: caps are products of fractions."""


class Budget:
    """The sizes of one iteration's microbatches on one rank, and the sum of what is held.

    A microbatch whose size is not known counts as ``largest``.

    Args:
        reference: Megatron's order of the rank.
        cap: most that may be held, in chunk activations of the largest microbatch.
        largest: size of the largest microbatch.
        deferred: share of an activation that its deferred weight gradients keep.
    """

    def __init__(
        self, reference: Reference, *, cap: float, largest: int = UNIT, deferred: float = 1.0
    ) -> None:
        self.cap, self.largest = cap, largest
        self.limit = math.floor((cap + ROUNDING) * largest)
        self.in_flight = self.kept = self.peak = 0
        self._deferred = deferred
        self._places = reference.places
        self._steps = [sign * largest for sign in reference.signs]
        self.unrun = largest * reference.signs.count(1)
        self.smallest = largest

    def fits(self, place: int, after: Sequence[int]) -> bool:
        """The forward at ``place`` of Megatron's order fits, and so does the rest of that order
        after it.

        The walk visits the unrun tasks that precede this one in Megatron's order: none while the
        rank follows that order, a few otherwise.

        Args:
            after: the next unrun place of each place; the last entry is the first unrun place.
        """
        limit, steps = self.limit, self._steps
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

    def backward(self, place: int, *, defers: bool) -> None:
        """Count the backward at ``place`` as run; ``defers``: its weight gradients are left."""
        size = -self._steps[place]
        self.in_flight -= size
        if defers:
            self.kept += math.ceil(self._deferred * size)

    def weight(self, place: int, left: int, pieces: int) -> None:
        """Count a weight gradient of the backward at ``place`` as run; ``left`` of its ``pieces``
        were left before. Rounding up the whole, not each piece, keeps this from ever raising.
        """
        share = self._deferred * -self._steps[place]
        self.kept += math.ceil(share * (left - 1) / pieces) - math.ceil(share * left / pieces)

    def learn(self, microbatch: int, size: int, forwards_run: Sequence[int]) -> None:
        """Replace the assumed size of a microbatch, none of whose backwards has run here."""
        steps = self._steps
        for chunk, run in enumerate(forwards_run):
            place = self._places[Kind.F][chunk][microbatch]
            less = steps[place] - size
            if microbatch < run:
                self.in_flight -= less
            else:
                self.unrun -= less
            steps[place] = size
            steps[self._places[Kind.B][chunk][microbatch]] = -size
        self.smallest = min(self.smallest, size)


class Sizes:
    """The sizes of one iteration's microbatches as far as they are known, checked.

    Args:
        largest: no microbatch may be larger.
    """

    def __init__(self, geometry: Geometry, largest: int) -> None:
        self._rank, self.largest = geometry.rank, largest
        self.known: list[int | None] = [None] * geometry.num_microbatches

    def learn(self, microbatch: int, size: int) -> bool:
        """Note a size; True if it is smaller than what was assumed.

        Raises:
            ScheduleError: there is no such microbatch, it is larger than the largest, or it was
                given another size before.
        """
        what = f"pipeline rank {self._rank}: microbatch {microbatch} has size {size}"
        if not 0 <= microbatch < len(self.known):
            raise ScheduleError(f"{what}, but there are microbatches 0 .. {len(self.known) - 1}")
        if not 0 <= size <= self.largest:
            raise ScheduleError(
                f"{what}; the memory cap was set for sizes from 0 to {self.largest} "
                "(--seq-length times --micro-batch-size)"
            )
        before = self.known[microbatch]
        if before is not None and before != size:
            raise ScheduleError(f"{what}, but had size {before} before")
        self.known[microbatch] = size
        return before is None and size < self.largest

    def __getitem__(self, microbatch: int) -> int:
        """Size of a microbatch; the largest where it is not known."""
        size = self.known[microbatch]
        return self.largest if size is None else size

    def unlike(self) -> list[int] | None:
        """All sizes, or None if every microbatch counts as the largest."""
        sizes = [self[microbatch] for microbatch in range(len(self.known))]
        return sizes if min(sizes) < self.largest else None
