"""A stand-in for CUDA graphs on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Rerun:
    """Stand-in for a CUDA graph: each replay runs the function again, over the graph's buffers.

    ``replays`` records each replay.
    """

    def __init__(
        self, function: Callable[[], None], pool: Any, replays: list[Rerun] | None = None
    ) -> None:
        self._function, self._replays = function, replays

    def replay(self) -> None:
        if self._replays is not None:
            self._replays.append(self)
        with torch.enable_grad():
            self._function()
