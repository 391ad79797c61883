"""The memory of CUDA graphs: slots, for each length that is captured.

Every activation in flight has a *slot*, a memory pool and buffers, from its F until its last W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.dpp.config import POOL_GROWTH


class Slot:
    """The memory of one chunk activation: a pool, and input and output buffers.

    Args:
        example: a block's input, [s, b, h].
    """

    def __init__(self, example: torch.Tensor) -> None:
        self.pool = torch.cuda.graph_pool_handle() if example.is_cuda else None
        self.input = torch.empty_like(example, requires_grad=True)
        self.output = torch.empty_like(example, requires_grad=False)
        self.grad_output = torch.empty_like(example, requires_grad=False)
        self.graphs: dict[Any, Any] = {}
        """The graphs of each block that has been captured here."""


class Slots:
    """All slots of a rank for inputs of one shape. Every graph writes the input's gradient to one
    place, ``grad_input``.

    Args:
        example: a block's input, [s, b, h].
        may_add: True if there is memory for one slot more.
    """

    def __init__(self, example: torch.Tensor, may_add: Callable[[int], bool]) -> None:
        self._example, self._may_add = example.detach(), may_add
        self.grad_input = torch.empty_like(example, requires_grad=False)
        self._free: list[Slot] = []
        self.made: list[Slot] = []
        """Slots that have graphs."""
        self.slot_bytes = 0
        """Device memory of a slot, the smallest seen: the first include libraries' workspaces."""

    def take(self, block: Any) -> Slot | None:
        """A free slot, preferably with graphs of this block; a new one if none is free; None if
        there is no memory for that.
        """
        for place in range(len(self._free) - 1, -1, -1):
            if block in self._free[place].graphs:
                return self._free.pop(place)
        if self._free:
            return self._free.pop()
        return Slot(self._example) if self._may_add(len(self._example)) else None

    def add(self, slot: Slot, num_bytes: int) -> None:
        """Count a slot that has got its first graphs."""
        self.made.append(slot)
        self.slot_bytes = min(num_bytes, self.slot_bytes or num_bytes)

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)


class Pools:
    """The slots of a rank, for each length.

    With several lengths all slots together have room for as many tokens as the activation cap
    allows to be held; slots are never freed within a run of equal lengths.

    Args:
        example: a block's input of the longest microbatch, [s, b, h].
        rows: lengths s that are captured, up to the longest; it alone without them.
        most: activations of the longest microbatch that may be held.
    """

    def __init__(
        self,
        example: torch.Tensor,
        rows: Sequence[int] = (),
        most: Callable[[], float] | None = None,
    ) -> None:
        self._example, self._most = example, most
        self._by_rows: dict[int, Slots | None] = dict.fromkeys(rows or (len(example),))

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        if list(self._by_rows) == [len(self._example)]:
            return "the longest length"
        return "one of the lengths " + ", ".join(map(str, sorted(self._by_rows)))

    def of(self, hidden: Any) -> Slots | None:
        """The slots for an input; None where its shape is not captured."""
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != self._example.dim():
            return None
        rows = len(hidden)
        if rows not in self._by_rows or not alike(hidden, self._example[:rows]):
            return None
        found = self._by_rows[rows]
        if found is None:
            found = self._by_rows[rows] = Slots(self._example[:rows], self._may_add)
        return found

    def all(self) -> list[Slots]:
        """The slots of each length that has occurred."""
        return [slots for slots in self._by_rows.values() if slots is not None]

    @property
    def num_made(self) -> int:
        """Slots that have graphs."""
        return sum(len(slots.made) for slots in self.all())

    def slot_bytes(self, eager: float = 0.0) -> float:
        """Device memory of a slot for the longest microbatch; 0 without slots.

        Until that length has a slot it is estimated by the longest that has one, as bytes per row.
        What a pool takes beside its rows weighs more there, so the estimate is kept between
        the memory that the activation takes without graphs and ``POOL_GROWTH`` times as much.

        Args:
            eager: bytes of an activation of the longest microbatch without graphs; 0 where it
                is not known.
        """
        made = [(len(s.grad_input), s.slot_bytes) for s in self.all() if s.made]
        if not made:
            return 0
        rows, num_bytes = max(made)
        estimate = num_bytes * len(self._example) / rows
        if rows == len(self._example) or not eager or not num_bytes:
            return estimate
        return min(max(estimate, eager), POOL_GROWTH * eager)

    def _may_add(self, rows: int) -> bool:
        if len(self._by_rows) == 1 or self._most is None:
            return True  # the activation cap bounds their number
        used = sum(len(s.grad_input) * len(s.made) for s in self.all())
        return used + rows <= self._most() * len(self._example)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for tensors of one shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype
