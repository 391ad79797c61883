"""In the place of a CUDA graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Rerun:
    """What was to be captured is run at every replay, over the buffers that a graph would use."""

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        self._function = function

    def replay(self) -> None:
        with torch.enable_grad():
            self._function()
