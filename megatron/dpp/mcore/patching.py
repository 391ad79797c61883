"""Replacing a private name of megatron-core for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """``owner.name(...)`` is ``wrapper(original, ...)`` while the block runs; blocks may nest."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
