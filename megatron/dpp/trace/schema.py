"""The schema of trace files: names, versions, kinds of events, causes of idle time, and paths.

A trace file holds the events of one rank, one JSON object per line, inside one JSON array in
Chrome's Trace Event format: it opens in Perfetto as it is, it can be appended to, and a file whose
last line was cut short by a crash is still readable line by line. ``docs/trace-format.md``
describes every event. The simulator writes the same schema. Imports no torch.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SCHEMA_VERSION = 1
"""Raised when a reader of an older version could misread a newer file."""

HEADER_NAME = "megatron-dpp-trace"
"""Name of the first event, which carries the schema version and the rank's coordinates."""

TASK_TRACK, SEND_TRACK, ARRIVAL_TRACK = 1_000_000, 1_000_001, 1_000_002
"""``tid`` of the three tracks of a rank (``pid`` is its global rank). Perfetto takes ``tid`` 0, and
one that equals ``pid``, for the main thread.
"""


class _Word(str, enum.Enum):
    """A member of an enumeration that is its value as text."""

    def __str__(self) -> str:
        return str(self.value)


class EventKind(_Word):
    """Kind of an event: the first entry of a recorded tuple, and its ``cat`` in the file."""

    TASK = "task"
    EXPERTS = "experts"
    WAIT = "wait"
    SEND = "send"
    ARRIVAL = "arrival"
    SPAN = "span"
    ITERATION = "iteration"
    COUNTER = "counter"


class IdleCause(_Word):
    """Cause of idle time. All but ``DRAIN`` are recorded, which the analysis adds.

    Attributes:
        label: its name in a legend.
        meaning: its words in a sentence.
    """

    label: str
    meaning: str

    def __new__(cls, value: str, label: str, meaning: str) -> IdleCause:
        made = str.__new__(cls, value)
        made._value_, made.label, made.meaning = value, label, meaning
        return made

    WARM_UP = "warm-up", "warm-up", "filling the pipeline at the start"
    DRAIN = "drain", "drain", "draining it at the end"
    MESSAGE = "message", "waits for a message", "waiting for a message from a neighbour"
    MEMORY_CAP = "memory-cap", "waits for memory", "held back by the activation cap"
    LATE_MEMBER = (
        "late-member",
        "waits for another rank's message",
        "waiting for a message that another rank of the stage lacks",
    )
    LATE_LEADER = "late-leader", "waits for its leader", "waiting for the stage's leader to decide"
    LOOKAHEAD = "lookahead", "waits for the device", "waiting for the device to catch up"
    HOST = "host", "host", "the host: launching, deciding, Python"
    SEND = "send", "waits for the receiver", "waiting for a receiver"


AXES = ("data", "pipeline", "tensor", "context")
"""The coordinates that tell the ranks of a job apart. Expert-parallel ranks are data-parallel,
context-parallel or tensor-parallel ranks as well, so their coordinate tells nothing more.
"""


@dataclass(frozen=True, kw_only=True)
class TraceLayout:
    """Coordinates of a rank in its job.

    Args:
        data, pipeline, tensor, context: this rank's coordinates.
        data_size, pipeline_size, tensor_size, context_size: sizes of the groups.
        num_chunks: model chunks (virtual stages) per rank.
        schedule: ``dpp`` for the dynamic pipeline, ``pp`` for a static schedule.
    """

    data: int
    pipeline: int
    tensor: int
    data_size: int
    pipeline_size: int
    tensor_size: int
    context: int = 0
    context_size: int = 1
    num_chunks: int = 1
    schedule: str = "dpp"

    @property
    def place(self) -> tuple[int, ...]:
        """The coordinates in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of ``AXES``."""
        return tuple(getattr(self, f"{axis}_size") for axis in AXES)

    def at(self, place: Sequence[int]) -> TraceLayout:
        """The layout of the rank at another place of the same job."""
        data, pipeline, tensor, context = place
        return replace(self, data=data, pipeline=pipeline, tensor=tensor, context=context)

    def directory_name(self) -> str:
        """Name of the directory that the files of all ranks of a run share."""
        return f"{self._named(self.sizes)}-{self.schedule}"

    def file_name(self) -> str:
        """Name of this rank's file."""
        return f"benchmark-{self._named(self.place)}.json"

    def _named(self, numbers: Sequence[int]) -> str:
        """The numbers with their axes; that of the context only where it is cut."""
        shown = AXES if self.context_size > 1 else AXES[:-1]
        return "-".join(f"{axis}-{n}" for axis, n in zip(shown, numbers, strict=False))

    def path(self, directory: str | os.PathLike[str]) -> Path:
        """Full path of this rank's file below the trace directory (``benchmark`` by default)."""
        return Path(directory) / self.directory_name() / self.file_name()


def parse_iterations(text: str) -> frozenset[int]:
    """Iterations named by a flag such as ``3,10-12``.

    Raises:
        ValueError: ``text`` is not a comma-separated list of numbers and ranges.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last) if dash else int(first)
        except ValueError:
            raise ValueError(
                f"iterations {text!r}: {part!r} is neither a number nor a range like 10-12"
            ) from None
        if low > high:
            raise ValueError(f"iterations {text!r}: the range {part!r} runs backwards")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)
