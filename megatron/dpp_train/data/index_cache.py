"""Keeps the cache of megatron-core's sample indices safe and up to date.

The cache lies beside the corpus by default, where others may write too. megatron-core follows a
link there, and overwrites what it points to. It writes over an index that another run has mapped,
and takes the indices of an earlier corpus of the same name for those of this one.
"""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
from megatron.core.datasets import blended_dataset, gpt_dataset, masked_dataset

from megatron.dpp.core.compat import replaced
from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import open_text_to_write, read_bytes, replacing

_WRITERS: tuple[ModuleType, ...] = (blended_dataset, gpt_dataset, masked_dataset)


@contextlib.contextmanager
def own_files_only() -> Iterator[None]:
    """Around the building of data sets: they write regular files of this user, and nothing else.

    Raises:
        OSError: from data sets, at a link, a pipe or another's file in the place of an index.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(numpy, "save", _save))
        for module in _WRITERS:
            setattr(module, "open", _opened)  # noqa: B010 - in front of the built-in one
            stack.callback(delattr, module, "open")
        yield


def drop_stale(kind: type, config: Any) -> None:
    """Remove cached indices of a corpus that was written since, so that they are built anew. For
    the rank that builds them, before it does.

    Args:
        kind, config: the class and the configuration of the data sets.

    Raises:
        DataError: they cannot be removed.
    """
    if config.fast_cache_load or config.defer_npy_index_mmap:  # asked to be loaded without a look
        return
    for prefix in _prefixes(config):
        folder = Path(config.path_to_cache or f"{prefix}/cache/{kind.__name__}_indices")
        for description in folder.glob("*-description.txt"):
            if _is_older(description, Path(f"{prefix}.idx")) and _is_of(description, prefix):
                _drop(description, prefix)


def _prefixes(config: Any) -> set[str]:
    blends = [config.blend, *(config.blend_per_split or [])]
    return {prefix for blend in blends if blend for prefix in blend[0]}


def _is_older(cached: Path, index: Path) -> bool:
    """True if the index is another one since. Its inode tells, as a file that was moved there keeps
    the time of its content."""
    with contextlib.suppress(OSError):
        return cached.lstat().st_ctime_ns < index.stat().st_ctime_ns
    return False


def _is_of(description: Path, prefix: str) -> bool:
    try:
        return bool(json.loads(read_bytes(description))["dataset_path"] == prefix)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # of a blend, or broken: nothing that is loaded


def _drop(description: Path, prefix: str) -> None:
    try:
        description.unlink()
    except OSError as error:
        raise DataError(
            f"{description}: its indices are older than {prefix}.idx, and cannot be removed "
            f"({error.strerror}): name another --data-cache-path, or take them as they are with "
            "--dataloader-fast-cache-load"
        ) from error


def _save(original: Callable[..., None], file: Any, array: Any, **options: Any) -> None:
    if not isinstance(file, str):
        original(file, array, **options)
        return
    with replacing(file) as target:
        original(target, array, **options)


def _opened(path: str, mode: str = "r", **options: Any) -> Any:
    if mode in ("w", "wt"):
        return open_text_to_write(path)
    return builtins.open(path, mode, **options)
