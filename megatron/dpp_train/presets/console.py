"""A run as a person sees it: one progress line, read from the run's metrics, and its end."""

from __future__ import annotations

import datetime
import json
import shutil
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

_SECONDS_BETWEEN = 10.0
"""Between two lines where the output is no terminal."""
_MEAN_OF = 20


def duration(seconds: float) -> str:
    """Days, hours, minutes and seconds: ``1 day, 2:03:04``."""
    return str(datetime.timedelta(seconds=round(seconds)))


class Progress:
    """Follows ``metrics.jsonl`` and prints the progress of a run.

    Args:
        metrics: written by the last rank; need not be there yet.
        steps: iterations that the run will make; None where samples are counted.
    """

    def __init__(self, metrics: Path, steps: int | None) -> None:
        self._metrics, self._steps = metrics, steps
        self._offset = metrics.stat().st_size if metrics.exists() else 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MEAN_OF)
        self._on_terminal = sys.stdout.isatty()
        self._said = 0.0
        self._began = time.monotonic()
        self._shown = ""
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.validation: float | None = None

    def look(self) -> None:
        """Read what was written since, and show it."""
        fresh = False
        for row in self._rows():
            if "validation_loss" in row:
                self.validation = row["validation_loss"]
                if row["iteration"] != self._steps:
                    said = f"validation loss {_loss(self.validation)}"
                    self.say(f"step {row['iteration']}: {said}")
            elif "loss" in row:
                self.first = self.first or row
                self.last, fresh = row, True
                if row.get("ms"):
                    self._recent.append((row["ms"] / 1e3, row.get("tokens") or 0.0))
        if self._on_terminal:
            waited = duration(time.monotonic() - self._began)
            self._rewrite(self.line() if self.last else f"starting   {waited}")
        elif fresh and self._is_due():
            print(self.line(), flush=True)
            self._said = time.monotonic()

    def _is_due(self) -> bool:
        ended = self._steps is not None and self.last["iteration"] >= self._steps
        return not self._said or ended or time.monotonic() - self._said >= _SECONDS_BETWEEN

    def _rows(self) -> list[dict[str, Any]]:
        """The whole lines that were written since."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._offset)
                lines, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(lines) + len(end)
        return [json.loads(line) for line in lines.splitlines()]

    def line(self) -> str:
        """Step, loss, tokens per second and time left, in at most 80 columns."""
        row, total = self.last, f"/{self._steps}" if self._steps else ""
        parts = [
            f"step {row['iteration']:>{len(str(self._steps or 0))}}{total}",
            f"loss {_loss(row['loss'])}",
        ]
        seconds = statistics.fmean(each for each, _ in self._recent) if self._recent else 0.0
        tokens = sum(count for _, count in self._recent)
        if tokens and seconds:
            parts.append(f"{tokens / len(self._recent) / seconds:,.0f} tokens/s")
        if self._steps and seconds:
            parts.append(f"{duration((self._steps - row['iteration']) * seconds)} left")
        return "   ".join(parts)[:80]

    def _rewrite(self, text: str) -> None:
        width = min(80, shutil.get_terminal_size().columns) - 1
        if text != self._shown:
            print(f"\r\x1b[2K{text[:width]}", end="", flush=True)
            self._shown = text

    def say(self, text: str) -> None:
        """A line of its own, above the progress line."""
        if self._shown:
            self._rewrite("")
        print(text, flush=True)

    def end(self) -> None:
        """Leave the progress line as it is."""
        if self._shown:
            print(flush=True)
            self._shown = ""

    def summary(self) -> str:
        """Steps, time and losses of a run that ended well."""
        took = duration(time.monotonic() - self._began)
        if not self.last:
            return f"finished in {took}"
        losses = f"{_loss(self.first['loss'])} -> {_loss(self.last['loss'])}"
        validation = f", validation {_loss(self.validation)}" if self.validation else ""
        return f"finished: step {self.last['iteration']} in {took}, loss {losses}{validation}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
