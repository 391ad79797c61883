"""Writes the cache of megatron-core's sample indices as a run writes its other files.

The cache lies beside the corpus by default, where others may write too. megatron-core follows a
link there, and overwrites what it points to.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy
from megatron.core.datasets import blended_dataset, gpt_dataset, masked_dataset

from megatron.dpp.core.compat import replaced
from megatron.dpp.safe_files import open_text_to_write, open_to_write

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


def _save(original: Callable[..., None], file: Any, array: Any, **options: Any) -> None:
    if not isinstance(file, str):
        original(file, array, **options)
        return
    with open_to_write(file) as target:
        original(target, array, **options)


def _opened(path: str, mode: str = "r", **options: Any) -> Any:
    if mode in ("w", "wt"):
        return open_text_to_write(path)
    return builtins.open(path, mode, **options)
