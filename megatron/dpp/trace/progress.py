"""A progress bar on a terminal's standard error, for the trace tools; silent when that is not a
terminal.
"""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_PERIOD_S = 0.1


class ProgressBar:
    """Shows how much of ``total`` (any unit) is done."""

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._shown = 0.0
        self._visible = sys.stderr.isatty()

    def advance(self, amount: int, label: str) -> None:
        """``amount`` more is done; redraws at most ten times per second."""
        self._done += amount
        now = time.monotonic()
        if not self._visible or now - self._shown < _PERIOD_S:
            return
        self._shown = now
        share = min(self._done / self._total, 1.0)
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        print(f"\r[{bar}] {share:4.0%} {label:<24.24}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Clear the line."""
        if self._visible:
            print("\r" + " " * (_WIDTH + 34) + "\r", end="", file=sys.stderr, flush=True)
