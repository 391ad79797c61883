"""Notices that a corpus is written while a run reads it.

Token files are mapped. A file that another one replaces by its name stays mapped as it was. One
that is written in place has other tokens at once; where it gets shorter, its reader ends by SIGBUS.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.dpp.safe_files import FileState

_BETWEEN_SECONDS = 1.0
"""Between two looks: on a network's file system each may ask the server."""


class Corpora:
    """The token files of a data set, as they are when this is made.

    Args:
        mapped: the files are mapped. Otherwise a file that replaces one is read, too, and counts.
    """

    def __init__(self, dataset: Any, *, mapped: bool) -> None:
        self._mapped = mapped
        self._was = {path: FileState.of(path) for path in _files(dataset)}
        self._next = time.monotonic() + _BETWEEN_SECONDS

    def fault(self, *, at_once: bool = False) -> str:
        """The text about a file that was written since; empty without one, and where the last look
        was a moment ago and ``at_once`` does not ask for another."""
        if not at_once and time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + _BETWEEN_SECONDS
        for path, was in self._was.items():
            now = FileState.of(path)
            if now == was or (self._mapped and not was.is_before(now)):
                continue
            return (
                f"{path}: written while this run reads it (it has {now.size} bytes, and had "
                f"{was.size} when the run began): put new data under another name, and start again "
                "with whole files"
            )
        return ""


def _files(dataset: Any) -> Iterator[Path]:
    """The token files below a data set of megatron-core or of ``sequences``."""
    for part in getattr(dataset, "datasets", ()):  # of a blend
        yield from _files(part)
    low = getattr(dataset, "dataset", None)
    for each in (low, getattr(low, "tokens", None), getattr(low, "answers", None)):
        if isinstance(each, IndexedDataset):
            yield from (Path(each.path_prefix + suffix) for suffix in (".bin", ".idx"))
