"""Guards of checkpoints: one error for every way in which writing fails, and checksums."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, by its base

from megatron.dpp.errors import DataError
from megatron.dpp_train import culprits
from megatron.dpp_train.checkpoint import checksums, durable
from megatron.dpp_train.checkpoint.files import Found, unfinished_directory
from megatron.dpp_train.checkpoint.writers import manager_ended
from megatron.dpp_train.state import Run


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
    except (OSError, EOFError, RuntimeError, CheckpointingException, CheckpointException) as error:
        if worker := culprits.of_worker(error):  # PyTorch notices its end wherever the rank is
            raise DataError(worker) from error
        room = durable.no_room(Path(root), "--save")
        raise DataError(
            f"{path}: saving failed: {_cause(error)}{room}; the checkpoint before is untouched"
        ) from error


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # by rank, of dist_checkpointing's coordinator
    if failures is None:
        return manager_ended() or culprits.find(error) or str(error)
    named = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(failures.items())]
    return "; ".join(named) or "another rank could not write"


def note_shards(target: Path, rank: int) -> None:
    """Note the checksums of the ``torch_dist`` files that ``rank`` wrote."""
    checksums.note(target, target.glob(f"*__{rank}_*.distcp"), rank)


def noting(request: AsyncRequest, target: Path, rank: int) -> AsyncRequest:
    """``request``, whose background process also notes the checksums of what it wrote."""
    if request.async_fn is None:
        return request
    write = functools.partial(_write_and_note, request.async_fn, target, rank)
    return request._replace(async_fn=write)


def _write_and_note(
    write: Callable[..., None], target: Path, rank: int, *args: Any, **kwargs: Any
) -> None:
    write(*args, **kwargs)
    # A full disk is reported for the shards; their queue hears of no other error.
    with contextlib.suppress(OSError):
        note_shards(target, rank)


def verify(run: Run, found: Found) -> None:
    """Compares a checkpoint's files with their checksums; a collective, each rank takes a share.

    Raises:
        DataError: on every rank; names the files that are damaged.
    """
    error, sums = "", None
    try:
        sums = checksums.read(found.path)
        checksums.check(found.path, sums or {}, list(sums or {})[run.rank :: run.args.world_size])
    except DataError as damaged:
        error = str(damaged)
    errors: list[Any] = [None] * run.args.world_size
    dist.all_gather_object(errors, error)
    if any(errors):
        raise DataError("; ".join(dict.fromkeys(filter(None, errors))))
    if sums is None:
        run.say(f"{found.path}: saved without checksums ({checksums.NAME}), loaded unverified")
