"""A few numbers per iteration, summed up by the recorder's writing thread while it writes.

For TensorBoard and the like: the training loop asks the recorder for them and adds them to its own.
They are this rank's; the report has everybody's.
"""

from __future__ import annotations

from typing import Any

from megatron.dpp.trace.vocabulary import EventKind


class IterationScalars:
    """Takes events with resolved times; ``latest`` is what the last whole iteration came to.

    Its keys: ``dpp/bubble`` (idle share from the iteration's start to this rank's last task),
    ``dpp/held`` (most activations held), ``dpp/memory-bytes`` and ``dpp/bytes/SOURCE-DESTINATION``
    per link.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._busy = 0
        self._last = 0
        self._values: dict[str, float] = {}

    def add(self, event: tuple[Any, ...]) -> None:
        """Count one event (see ``recorder``), whose times are in nanoseconds."""
        kind, start, end = event[:3]
        if kind == EventKind.TASK:
            self._busy += end - start
            self._last = max(self._last, end)
        elif kind == EventKind.SEND:
            source = getattr(event[4], "source", None)
            if source is not None:
                name = f"dpp/bytes/{source}-{event[4].destination}"
                self._values[name] = self._values.get(name, 0.0) + event[6]
        elif kind == EventKind.COUNTER:
            name = "dpp/memory-bytes" if event[4] == "memory" else f"dpp/{event[4]}"
            self._values[name] = max(self._values.get(name, 0.0), float(event[5]))
        elif kind == EventKind.ITERATION:
            if self._last > start:
                self._values["dpp/bubble"] = 1.0 - self._busy / (self._last - start)
            self.latest = self._values
            self._clear()
