"""One error for every way in which writing a checkpoint fails."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, by its base

from megatron.dpp.cli.checkpoint_files import unfinished_directory
from megatron.dpp.errors import DataError

_ROOM = 1 << 20
"""Bytes. With less free space a failed write is taken for one to a full disk."""


@contextlib.contextmanager
def saving(root: str | Path, iteration: int) -> Iterator[Path]:
    """Around writing and committing a checkpoint: gives the directory to write into, and makes one
    plain error of what a full disk, or a rank that has left, raises.

    Raises:
        DataError: with the directory, the cause where this rank knows it, and the room left.
    """
    path = unfinished_directory(root, iteration)
    try:
        yield path
    except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
        raise DataError(
            f"{path}: saving failed: {_cause(error)}{_full(Path(root))}; the checkpoint before is "
            "untouched"
        ) from error


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # by rank, of dist_checkpointing's coordinator
    if failures is None:
        return str(error)
    named = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(failures.items())]
    return "; ".join(named) or "another rank could not write"


def _full(root: Path) -> str:
    """Text about a full disk, which PyTorch's errors do not mention; else empty."""
    while not root.exists():
        root = root.parent
    usage = shutil.disk_usage(root)
    if usage.free >= _ROOM:
        return ""
    return (
        f" (no space left on device: {usage.free} of {usage.total} bytes are free; make room, or "
        "choose another --save)"
    )
