"""Fixed orders: schedules that follow a list, whatever arrives first.

A :class:`FixedOrder` stands in for a :class:`~megatron.dpp.schedule.Scheduler` in a simulation.
Megatron's own orders (1F1B, interleaved) are the policy ``megatron`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.direction import Direction
from megatron.dpp.schedule import DIRECTION_OF, Action, Geometry, Kind


class FixedOrder:
    """Follows ``order``, every task of a rank, and waits where the next task is not ready.

    Args:
        kept: share of an activation that a ``W`` frees; 0 for a fused backward.
        shares: size of each microbatch in that of the largest; empty where they are equal.
    """

    def __init__(
        self,
        order: Sequence[Action],
        geometry: Geometry,
        *,
        kept: float = 0.0,
        shares: Sequence[float] = (),
    ) -> None:
        self._order, self._kept, self._geometry = order, kept, geometry
        self._shares = shares or [1.0] * geometry.num_microbatches
        # Inputs from the data and gradients from the loss need no message.
        self._first = 0 if geometry.is_first else None
        self._last = geometry.num_chunks - 1 if geometry.is_last else None
        self._position = 0
        self._arrived: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.held = 0.0
        self.peak_held = 0.0
        self.fused = False

    @property
    def done(self) -> bool:
        return self._position == len(self._order)

    def arrived(self, direction: Direction, chunk: int, total: int) -> None:
        """Report that ``total`` messages of a channel have arrived."""
        self._arrived[direction][chunk] = total

    def next(self) -> Action | None:
        """The next task of the list if its input has arrived."""
        if self.done:
            return None
        action = self._order[self._position]
        if action.kind != Kind.W and not self._is_here(action):
            return None
        self._position += 1
        change = {Kind.F: 1.0, Kind.B: self._kept - 1.0, Kind.W: -self._kept}
        self.held += change[action.kind] * self._shares[action.microbatch]
        self.peak_held = max(self.peak_held, self.held)
        return action

    def _is_here(self, action: Action) -> bool:
        implied = self._first if action.kind == Kind.F else self._last
        if action.chunk == implied:
            return True
        arrived = self._arrived[DIRECTION_OF[action.kind]].get(action.chunk, 0)
        return arrived > self._geometry.position(action.kind, action.microbatch)


def gpipe_order(geometry: Geometry) -> list[Action]:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019); one chunk per rank."""
    microbatches = range(geometry.num_microbatches)
    return [Action(Kind.F, 0, i) for i in microbatches] + [
        Action(Kind.B, 0, i) for i in microbatches
    ]


def zb_h1_order(geometry: Geometry) -> list[Action]:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023), with one chunk per rank.

    1F1B with ``W`` apart from ``B``, and 1F1B's memory. Rank ``r`` defers its first ``r`` ``W``,
    then runs one after each ``B``; the deferred ones fill the end.
    """
    m, behind = geometry.num_microbatches, geometry.num_ranks - 1 - geometry.rank
    warmup = min(behind, m)
    order = [Action(Kind.F, 0, i) for i in range(warmup)]
    weights = 0
    for i in range(m):
        if i + warmup < m:
            order.append(Action(Kind.F, 0, i + warmup))
        order.append(Action(Kind.B, 0, i))
        if i >= geometry.rank:
            order.append(Action(Kind.W, 0, weights))
            weights += 1
    return order + [Action(Kind.W, 0, i) for i in range(weights, m)]
