"""Stops a run whose loss is not finite, without making the host wait for the device.

Reading a loss as soon as it is computed would let every forward of the last stage run to its end
before the next task could be launched.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch


class LossCheck:
    """Looks at the training losses of a rank, each as soon as a GPU has it.

    A loss on a GPU is read when a later one is added and the device has got that far; the last one
    of an iteration waits for all, so that none is missed, and before a gradient that is not finite
    reaches other ranks' reductions. A loss on a CPU is read at once.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.Tensor, Any]] = deque()
        self._iteration = -1
        self._added = 0

    def add(self, loss: torch.Tensor, iteration: int, per_iteration: int) -> float | None:
        """Take one microbatch's loss.

        Args:
            loss: a scalar.
            iteration: which one it belongs to; what an earlier one left unread is forgotten.
            per_iteration: the number of losses that this iteration will have.

        Returns:
            The first loss found that is NaN or infinite, None as long as there is none.
        """
        if iteration != self._iteration:
            self._iteration, self._added = iteration, 0
            self._unread.clear()
        self._added += 1
        self._unread.append(_on_the_way(loss.detach()))
        return self._read(wait=self._added >= per_iteration)

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


def _on_the_way(loss: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event that tells when it is there; None where it is already."""
    if not loss.is_cuda:
        return loss, None
    copy = loss.to("cpu", non_blocking=True)  # into pinned memory
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event
