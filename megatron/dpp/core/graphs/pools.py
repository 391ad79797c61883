"""The memory of CUDA graphs: slots, which microbatches of several lengths share.

Every activation in flight has a *slot*, a memory pool and buffers, from its F until its last W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.dpp.config import POOL_GROWTH

SPARE = 1.5
"""Times the tokens that may be held for which slots of several lengths have room: a microbatch may
find only longer slots free."""


class Slot:
    """The memory of one chunk activation: a pool, and input and output buffers.

    Args:
        example: a block's input of the longest microbatch that it holds, [s, b, h].
    """

    def __init__(self, example: torch.Tensor) -> None:
        self.rows = len(example)
        self.pool = torch.cuda.graph_pool_handle() if example.is_cuda else None
        self.input, self.output, self.grad_output = (
            torch.empty_like(example, requires_grad=False) for _ in range(3)
        )
        self.graphs: dict[tuple[Any, Any], Any] = {}
        """The graphs that have been captured here, by block and what they replay."""
        self.num_bytes = 0
        """Device memory that the first of them took."""


class Pools:
    """The slots of a rank.

    A slot serves microbatches of its own length and shorter ones, one at a time. It is made as long
    as the microbatch that finds none free. With several lengths all slots together have room for
    ``SPARE`` times the tokens that the activation cap allows to be held. Slots are never freed
    within a run of equal lengths. Every graph writes the input's gradient to one place,
    ``grad_input``.

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
        self._example, self._most = example.detach(), most
        self._rows = sorted(rows) or [len(example)]
        self.grad_input = torch.empty_like(self._example[: self._rows[-1]])
        self._free: list[Slot] = []
        self.made: list[Slot] = []
        """Slots that have graphs."""

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        if self._rows == [len(self._example)]:
            return "the longest length"
        return "one of the lengths " + ", ".join(map(str, self._rows))

    def knows(self, hidden: Any) -> bool:
        """True for an input whose shape is captured."""
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != self._example.dim():
            return False
        rows = len(hidden)
        return rows in self._rows and alike(hidden, self._example[:rows])

    def take(self, graphs: tuple[Any, Any], rows: int) -> Slot | None:
        """The shortest free slot that holds so many rows, preferably with these graphs; a new one
        if none is free; None if there is no memory for that.
        """
        fits = [slot for slot in self._free if slot.rows >= rows]
        if fits:
            found = min(fits, key=lambda slot: (slot.rows, graphs not in slot.graphs))
            self._free.remove(found)
            return found
        return Slot(self._example[:rows]) if self._may_add(rows) else None

    def add(self, slot: Slot, num_bytes: int) -> None:
        """Count a slot that has got its first graphs."""
        slot.num_bytes = num_bytes
        self.made.append(slot)

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    def slot_bytes(self, eager: float = 0.0) -> float:
        """Device memory of a slot for the longest microbatch; 0 without slots.

        The smallest of the longest slots counts: the first include libraries' workspaces. Until the
        longest microbatch has one it is estimated from shorter ones, as bytes per row. What a pool
        takes beside its rows weighs more there, so the estimate is kept between the memory that the
        activation takes without graphs and ``POOL_GROWTH`` times as much.

        Args:
            eager: bytes of an activation of the longest microbatch without graphs; 0 where it
                is not known.
        """
        if not self.made:
            return 0
        rows = max(slot.rows for slot in self.made)
        num_bytes = min(slot.num_bytes for slot in self.made if slot.rows == rows)
        estimate = num_bytes * len(self._example) / rows
        if rows == len(self._example) or not eager or not num_bytes:
            return estimate
        return min(max(estimate, eager), POOL_GROWTH * eager)

    def _may_add(self, rows: int) -> bool:
        if len(self._rows) == 1 or self._most is None:
            return True  # the activation cap bounds their number
        used = sum(slot.rows for slot in self.made)
        return used + rows <= SPARE * self._most() * len(self._example)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for tensors of one shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype
