"""Stops a run whose loss is not finite, without making the host wait for the device.

Reading a loss as soon as it is computed would let every forward of the last stage run to its end
before the next task could be launched.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from megatron.dpp.mcore.training.grad_checks import on_the_way


class LossCheck:
    """Looks at the training losses of a rank, each as soon as a GPU has it.

    A loss on a GPU is read when a later one is added and the device has got that far; the rest is
    waited for when the step is launched. A loss on a CPU is read at once.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.Tensor, Any]] = deque()
        self._iteration = -1

    def add(self, loss: torch.Tensor, iteration: int) -> float | None:
        """Take one microbatch's loss.

        Args:
            loss: a scalar.
            iteration: which one it belongs to; what an earlier one left unread is forgotten.

        Returns:
            The first loss found that is NaN or infinite, None as long as there is none.
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._unread.clear()
        self._unread.append(on_the_way(loss.detach()))
        return self._read(wait=False)

    def rest(self) -> float | None:
        """Wait for all that were added; the first one that is not finite, None if all are."""
        return self._read(wait=True)

    def _read(self, wait: bool) -> float | None:
        while self._unread:
            value, event = self._unread[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return None
            self._unread.popleft()
            if not math.isfinite(value.item()):
                return value.item()
        return None
