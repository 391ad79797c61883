"""The schema of trace files: names, versions and paths.

A trace file holds the events of one rank, one JSON object per line, inside one JSON array in
Chrome's Trace Event format: it opens in Perfetto as it is, it can be appended to, and a file whose
last line was cut short by a crash is still readable line by line. ``docs/trace-format.md``
describes every event. The simulator writes the same schema. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA_VERSION = 1
"""Raised when a reader of an older version could misread a newer file."""

HEADER_NAME = "megatron-dpp-trace"
"""Name of the first event, which carries the schema version and the rank's coordinates."""

TASK_TRACK, SEND_TRACK, ARRIVAL_TRACK = 1_000_000, 1_000_001, 1_000_002
"""``tid`` of the three tracks of a rank (``pid`` is its global rank). Perfetto takes ``tid`` 0, and
one that equals ``pid``, for the main thread: with 0, 1 and 2 the tasks of ranks 1 and 2 lay on the
tracks of their messages. Older files have those.
"""


@dataclass(frozen=True, kw_only=True)
class TraceLayout:
    """Coordinates of a rank in its job.

    Args:
        data, pipeline, tensor: this rank's coordinates.
        data_size, pipeline_size, tensor_size: sizes of the three groups.
        num_chunks: model chunks (virtual stages) per rank.
        schedule: ``dpp`` for the dynamic pipeline, ``pp`` for a static schedule.
    """

    data: int
    pipeline: int
    tensor: int
    data_size: int
    pipeline_size: int
    tensor_size: int
    num_chunks: int = 1
    schedule: str = "dpp"

    def directory_name(self) -> str:
        """Name of the directory that the files of all ranks of a run share.

        >>> layout = TraceLayout(
        ...     data=0, pipeline=1, tensor=0, data_size=1, pipeline_size=4, tensor_size=2
        ... )
        >>> layout.directory_name()
        'data-1-pipeline-4-tensor-2-dpp'
        """
        sizes = f"data-{self.data_size}-pipeline-{self.pipeline_size}-tensor-{self.tensor_size}"
        return f"{sizes}-{self.schedule}"

    def file_name(self) -> str:
        """Name of this rank's file.

        >>> layout = TraceLayout(
        ...     data=0, pipeline=1, tensor=0, data_size=1, pipeline_size=4, tensor_size=2
        ... )
        >>> layout.file_name()
        'benchmark-data-0-pipeline-1-tensor-0.json'
        """
        return f"benchmark-data-{self.data}-pipeline-{self.pipeline}-tensor-{self.tensor}.json"

    def path(self, directory: str | os.PathLike[str]) -> Path:
        """Full path of this rank's file below the trace directory (``benchmark`` by default)."""
        return Path(directory) / self.directory_name() / self.file_name()

    def as_dict(self) -> dict[str, int | str]:
        """The fields, as the header of a file carries them."""
        return asdict(self)


def parse_iterations(text: str) -> frozenset[int]:
    """Iterations named by a flag such as ``3,10-12``.

    Raises:
        ValueError: ``text`` is not a comma-separated list of numbers and ranges.

    >>> sorted(parse_iterations("3,10-12"))
    [3, 10, 11, 12]
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
