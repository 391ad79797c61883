"""The state of one rank: five counters per chunk, and the tasks that they allow.

It decides which tasks *may* run and counts the one that does. A policy chooses among them through
the read-only :class:`View`. ``docs/policies.md`` has the safe rule and its proof.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule.actions import Action, Geometry, Kind
from megatron.dpp.schedule.budget import UNIT, Budget, KnownSizes, MemoryLimit
from megatron.dpp.schedule.reference import Reference


class View(Protocol):
    """A policy's view of its rank. Lists are indexed by chunk and must not be changed."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def cap(self) -> float:
        """Chunk activations of the largest microbatch that may be held."""
        ...

    @property
    def held(self) -> float:
        """Chunk activations of the largest microbatch that are held."""
        ...

    @property
    def weights_first(self) -> bool:
        """Deferred weight gradients should run before a forward: a soft limit bounds unlike sizes.
        What they keep lies between pieces that ``B`` has freed, which fit no activation of another
        size.
        """
        ...

    @property
    def sizes(self) -> KnownSizes:
        """The sizes of the microbatches as far as they are known."""
        ...

    @property
    def last_kind(self) -> Kind | None:
        """Kind of the last ``F`` or ``B`` that ran."""
        ...

    @property
    def forwards_run(self) -> list[int]: ...
    @property
    def forwards_arrived(self) -> list[int]: ...
    @property
    def backwards_run(self) -> list[int]: ...
    @property
    def gradients_arrived(self) -> list[int]: ...

    def forward(self, chunk: int) -> Action | None:
        """The next forward of ``chunk`` if it may run: its input is here and the cap allows it."""
        ...

    def backward(self, chunk: int) -> Action | None:
        """The next backward of ``chunk`` if it may run."""
        ...

    def weight(self) -> Action | None:
        """The oldest deferred weight gradient, or None."""
        ...

    def first_forward(self) -> Action | None:
        """The forward that may run and comes first in depth-first order."""
        ...

    def first_backward(self) -> Action | None:
        """The backward that may run and comes first in depth-first order."""
        ...

    def next_in_reference(self) -> Action | None:
        """The first task of Megatron's order that has not run, even if it may not run yet."""
        ...


class RankState:
    """The counters of one rank in one iteration. Implements :class:`View`.

    Args:
        cap: chunk activations of the largest microbatch that may be held.
        split_backward: ``W`` are tasks of their own.
        stock: deferred backwards from which a ``B`` includes its ``W``, if no other ``W`` of its
            chunk is deferred.
        beta: share of a chunk's activation that ``B`` frees; ``W`` frees the rest.
        reference: of the same geometry.
        largest: size of the largest microbatch.
        weights: the activation of each chunk, in chunk activations; empty where all are 1.
        limits: further bounds, all of which a forward must keep.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        cap: float,
        split_backward: bool,
        beta: float,
        reference: Reference,
        largest: int = UNIT,
        weights: Sequence[float] = (),
        limits: Sequence[MemoryLimit] = (),
        stock: float = math.inf,
    ) -> None:
        v = geometry.num_chunks
        self.geometry = geometry
        self.cap = cap
        self.forwards_run = [0] * v
        self.forwards_arrived = [0] * v
        self.backwards_run = [0] * v
        self.gradients_arrived = [0] * v
        self.last_kind: Kind | None = None
        self.sizes = KnownSizes(geometry, largest)
        self.num_out_of_order = 0
        self._reference = reference
        split = split_backward and not geometry.forward_only
        self._pieces = [geometry.pieces(c) if split else 0 for c in range(v)]
        self._stock, self._num_deferred = stock, [0] * v
        self.fused = False
        """The ``B`` that ran last includes a ``W`` that might have been deferred."""
        self._budget = Budget(
            reference, cap=cap, largest=largest, deferred=1.0 - beta, weights=weights
        )
        self._further = [
            Budget(
                reference, cap=limit.cap, largest=largest,
                deferred=1.0 - beta if limit.deferred else 0.0,
                weights=limit.weights, assumed=limit.assumed, soft=limit.soft,
            )
            for limit in limits
        ]  # fmt: skip
        self._budgets = [self._budget, *self._further]
        self.weights_first = any(limit.soft and limit.unlike for limit in limits)
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
    def least(self) -> list[tuple[float, float]]:
        """Of the cap and of each further limit that is not soft: its value, and the least under
        which Megatron's order of these sizes fits.
        """
        return [(budget.cap, budget.least) for budget in self._budgets if not budget.soft]

    @property
    def done(self) -> bool:
        return self._left == 0 and not self._deferred

    def forward(self, chunk: int) -> Action | None:
        i = self.forwards_run[chunk]
        if i < self.forwards_arrived[chunk] and self.forward_fits(chunk):
            return self._reference.order[self._reference.places[0][chunk][i]]
        return None

    def backward(self, chunk: int) -> Action | None:
        i = self.backwards_run[chunk]
        if i < self.gradients_arrived[chunk] and i < self.backwards_due(chunk):
            return self._reference.order[self._reference.places[1][chunk][self._units[i]]]
        return None

    def backwards_due(self, chunk: int) -> int:
        """The backwards of ``chunk`` that its forwards so far allow: those of whole groups."""
        return self._due[self.forwards_run[chunk]]

    def weight(self) -> Action | None:
        if not self._deferred:
            return None
        chunk, microbatch, _ = self._deferred[0]
        return Action(Kind.W, chunk, microbatch, self._next_piece)

    def next_piece(self) -> Action | None:
        """The next piece of the weight gradient of which a piece ran last; None if none is left."""
        return self.weight() if self._next_piece else None

    def forward_waits(self) -> bool:
        """True if the input of a forward is here. A piece of ``W`` may make room for it."""
        return any(map(int.__gt__, self.forwards_arrived, self.forwards_run))

    def first_forward(self) -> Action | None:
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

    def arrive(self, direction: int, chunk: int, total: int) -> None:
        """Count ``total`` inputs (``direction`` 0) or gradients (1) of ``chunk`` as arrived."""
        counts = self.gradients_arrived if direction else self.forwards_arrived
        if not counts[chunk] <= total <= self.geometry.num_microbatches:
            what = "gradients" if direction else "inputs"
            raise ScheduleError(
                f"pipeline rank {self.geometry.rank}, chunk {chunk}: {total} {what} reported after "
                f"{counts[chunk]}; the number only grows, to "
                f"{self.geometry.num_microbatches} microbatches"
            )
        counts[chunk] = total

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
            pieces = 0 if self.fused else self._pieces[chunk]
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
        if not self._pieces[chunk] or self._num_deferred[chunk]:
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
        kept, pieces = self._deferred[0][2], self._pieces[chunk]
        for budget, share in zip(self._budgets, kept, strict=True):
            budget.weight(share, pieces - self._next_piece, pieces)
        self._next_piece += 1
        if self._next_piece == pieces:
            self._deferred.popleft()
            self._num_deferred[chunk] -= 1
            self._next_piece = 0
