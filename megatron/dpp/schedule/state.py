"""The state of one rank: five counters per chunk, and the tasks that they allow.

It decides which tasks *may* run and counts the one that does. A policy, which only reads it,
chooses among them. ``docs/policies.md`` has the safe rule and its proof.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule.actions import Action, Geometry, Kind
from megatron.dpp.schedule.caps import ROUNDING, UNIT, MemoryLimit
from megatron.dpp.schedule.reference import Reference


class KnownSizes:
    """The sizes of one iteration's microbatches as far as they are known, checked.

    Args:
        largest: no microbatch may be larger.
    """

    def __init__(self, geometry: Geometry, largest: int) -> None:
        self._rank, self.largest = geometry.rank, largest
        self.least = largest
        """The smallest size that is known."""
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
        before, self.least = self.known[microbatch], min(self.least, size)
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


class Budget:
    """The sizes of one iteration's microbatches on one rank, and the sum of what is held.

    Args:
        reference: Megatron's order of the rank.
        bound: of what may be held.
        largest: size of the largest microbatch.
        deferred: share of an activation that its deferred weight gradients keep, where these count.
            A chunk's part above one activation (the LM head's logits) is not deferred.
    """

    def __init__(
        self, reference: Reference, bound: MemoryLimit, largest: int = UNIT, deferred: float = 1.0
    ) -> None:
        self.cap, self.largest, self.soft = bound.cap, largest, bound.soft
        self.limit = math.floor((bound.cap + ROUNDING) * largest)
        self.in_flight = self.kept = self.peak = 0
        chunks = range(len(reference.places[Kind.F]))
        self._weights = bound.weights or (1,) * len(chunks)
        deferred = deferred if bound.deferred else 0.0
        self._deferred = [deferred / max(self._weights[chunk], 1.0) for chunk in chunks]
        self._places, self._order = reference.places, reference.order
        first = [self._sized(chunk, bound.assumed or largest) for chunk in chunks]
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


class View:
    """A policy's view of its rank in one iteration, to be read only. Lists are indexed by chunk.

    Arguments are those of :class:`~megatron.dpp.schedule.scheduler.Scheduler`, checked.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        cap: float,
        split_backward: bool,
        beta: float,
        largest: int = UNIT,
        weights: Sequence[float] = (),
        limits: Sequence[MemoryLimit] = (),
        stock: float = math.inf,
    ) -> None:
        v = geometry.num_chunks
        self.geometry, self.cap = geometry, cap
        """``cap``: chunk activations of the largest microbatch that may be held."""
        self.weights = tuple(weights)
        """The activation of each chunk, in chunk activations; empty where all are 1."""
        self.forwards_run, self.forwards_arrived = [0] * v, [0] * v
        self.backwards_run, self.gradients_arrived = [0] * v, [0] * v
        self.last_kind: Kind | None = None
        """Of the last ``F`` or ``B`` that ran."""
        self.sizes = KnownSizes(geometry, largest)
        """Of the microbatches as far as they are known."""
        self.num_out_of_order = 0
        """Forwards and backwards that ran before their turn in Megatron's order."""
        self._reference = reference = Reference.of(geometry)
        split = split_backward and not geometry.forward_only
        self.pieces = [geometry.pieces(c) if split else 0 for c in range(v)]
        """Of each chunk's ``W``; 0 where its ``B`` always includes it."""
        self._stock, self._num_deferred = stock, [0] * v
        self.fused = False
        """The ``B`` that ran last includes a ``W`` that might have been deferred."""
        bounds = MemoryLimit(cap, self.weights), *limits
        self._budgets = [Budget(reference, limit, largest, 1.0 - beta) for limit in bounds]
        self._budget, *self._further = self._budgets
        self.weights_first = any(limit.soft and limit.unlike for limit in limits)
        """Deferred weight gradients should run before a forward: a soft limit bounds unlike sizes.
        What they keep lies between pieces that ``B`` has freed, which fit no activation of another
        size.
        """
        self._deferred: deque[tuple[int, int, list[int]]] = deque()
        self._next_piece = 0
        self._units, self._due = geometry.backward_units, geometry.due
        self._left = geometry.num_microbatches * v * (1 if geometry.forward_only else 2)
        self.held_back = False
        self._evaluates = geometry.forward_only
        self._last = geometry.num_chunks - 1 if geometry.is_last else -1
        # The unrun tasks of the reference as a doubly linked list; the last entry is its head and
        # tail.
        end = len(reference.order)
        self._after = [*range(1, end + 1), 0]
        self._before = [end, *range(end)]
        if geometry.is_first:
            self.forwards_arrived[0] = geometry.num_microbatches

    # What may run

    @property
    def held(self) -> float:
        """Chunk activations of the largest microbatch held: forwards without their backward, and
        shares that deferred ``W`` keep.
        """
        return (self._budget.in_flight + self._budget.kept) / self._budget.largest

    @property
    def peak_held(self) -> float:
        """Peak of :attr:`held`."""
        return self._budget.peak / self._budget.largest

    @property
    def done(self) -> bool:
        """Every task of this iteration has been handed out or reported as run."""
        return self._left == 0 and not self._deferred

    def forward(self, chunk: int) -> Action | None:
        """The next forward of ``chunk`` if it may run: its input is here and the cap allows it."""
        i = self.forwards_run[chunk]
        if i < self.forwards_arrived[chunk] and self.forward_fits(chunk):
            return self._reference.order[self._reference.places[0][chunk][i]]
        return None

    def backward(self, chunk: int) -> Action | None:
        """The next backward of ``chunk`` if it may run."""
        i = self.backwards_run[chunk]
        if i < self.gradients_arrived[chunk] and i < self.backwards_due(chunk):
            return self._reference.order[self._reference.places[1][chunk][self._units[i]]]
        return None

    def backwards_due(self, chunk: int) -> int:
        """The backwards of ``chunk`` that its forwards so far allow: those of whole groups."""
        return self._due[self.forwards_run[chunk]]

    def weight(self) -> Action | None:
        """The oldest deferred weight gradient, or None."""
        if not self._deferred:
            return None
        chunk, microbatch, _ = self._deferred[0]
        return Action(Kind.W, chunk, microbatch, self._next_piece)

    def next_piece(self) -> Action | None:
        """The next piece of the weight gradient of which a piece ran last; None if none is left."""
        return self.weight() if self._next_piece else None

    def first_forward(self) -> Action | None:
        """The forward that may run and comes first in depth-first order."""
        budget, evaluates = self._budget, self._evaluates
        if budget.in_flight + budget.kept + budget.smallest > budget.limit and not evaluates:
            return None
        reference, best, best_index = self._reference, -1, -1
        arrived, indices, places = self.forwards_arrived, reference.depth_first, reference.places[0]
        fits, after, further = budget.fits, self._after, self._further
        for chunk, i in enumerate(self.forwards_run):
            if i < arrived[chunk]:
                index, place = indices[chunk][i], places[chunk][i]
                if (best < 0 or index < best_index) and (
                    self.forward_fits(chunk) if evaluates or further else fits(place, after)
                ):
                    best, best_index = place, index
        return reference.order[best] if best >= 0 else None

    def first_backward(self) -> Action | None:
        """The backward that may run and comes first in depth-first order."""
        best, best_index = -1, -1
        arrived, forwards, due = self.gradients_arrived, self.forwards_run, self._due
        indices, last = self._reference.depth_first, len(forwards) - 1
        for chunk, i in enumerate(self.backwards_run):
            if i < arrived[chunk] and i < due[forwards[chunk]]:
                index = indices[last - chunk][i]
                if best < 0 or index < best_index:
                    best, best_index = chunk, index
        if best < 0:
            return None
        reference = self._reference
        return reference.order[reference.places[1][best][self._units[self.backwards_run[best]]]]

    def next_in_reference(self) -> Action | None:
        """The first task of Megatron's order that has not run, even if it may not run yet."""
        place = self._after[-1]
        return self._reference.order[place] if place < len(self._reference.order) else None

    def forward_fits(self, chunk: int) -> bool:
        """The next forward of ``chunk`` fits under the cap, and so does the rest of Megatron's
        order after it (:meth:`Budget.fits`).
        """
        if self.geometry.forward_only:
            return chunk > 0 or not self.held_back
        place = self._reference.places[0][chunk][self.forwards_run[chunk]]
        return all(budget.fits(place, self._after) for budget in self._budgets)

    # What changes

    def apply(self, action: Action) -> None:
        """Count ``action``, which may run, as run."""
        kind, chunk, microbatch, _ = action
        if kind == Kind.W:
            self._apply_weight(chunk)
            return
        place = self._reference.places[kind][chunk][microbatch]
        if kind == Kind.F:
            self.forwards_run[chunk] += 1
            if not self._evaluates:
                if chunk == self._last:
                    self.gradients_arrived[chunk] = self.backwards_due(chunk)
                for budget in self._budgets:
                    budget.forward(place)
        else:
            self.backwards_run[chunk] += 1
            self.fused = self._fuses(chunk)
            pieces = 0 if self.fused else self.pieces[chunk]
            kept = [budget.backward(place, pieces) for budget in self._budgets]
            if pieces:
                self._deferred.append((chunk, microbatch, kept))
                self._num_deferred[chunk] += 1
        self.last_kind = kind
        self._left -= 1
        after, before = self._after, self._before
        if after[-1] != place:
            self.num_out_of_order += 1
        behind, ahead = before[place], after[place]
        after[behind] = ahead
        before[ahead] = behind

    def _fuses(self, chunk: int) -> bool:
        """True if the next ``B`` of ``chunk`` includes its ``W``. Each weight then still gets its
        gradients in microbatch order.
        """
        if not self.pieces[chunk] or self._num_deferred[chunk]:
            return False
        return len(self._deferred) >= self._stock

    def learn(self, microbatch: int, size: int, keys: int = 0) -> None:
        """Take the size of a microbatch, none of whose backwards has run here, and what its group's
        keys hold from its F to its B.
        """
        position = self.geometry.position(Kind.B, microbatch)
        if max(self.backwards_run) > position:
            raise ScheduleError(
                f"pipeline rank {self.geometry.rank}: the size of microbatch {microbatch}, {size}, "
                "comes after its first backward has run"
            )
        if self.sizes.learn(microbatch, size) and not self.geometry.forward_only:
            for budget in self._budgets:
                budget.learn(microbatch, size + keys, self.forwards_run)

    def _apply_weight(self, chunk: int) -> None:
        kept, pieces = self._deferred[0][2], self.pieces[chunk]
        for budget, share in zip(self._budgets, kept, strict=True):
            budget.weight(share, pieces - self._next_piece, pieces)
        self._next_piece += 1
        if self._next_piece == pieces:
            self._deferred.popleft()
            self._num_deferred[chunk] -= 1
            self._next_piece = 0
