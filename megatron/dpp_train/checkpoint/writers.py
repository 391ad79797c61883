"""Processes that write a ``torch_dist`` checkpoint, bound to the life of the rank that saves.

megatron-core starts a writer per file and, at the first save, a manager process for its queue of
results, which imports PyTorch. A save that the rank waits for needs no manager. When the rank is
killed, the manager would stay for ever, and writers would go on writing into a folder that the next
run may use. ``saver`` saves inside :func:`bound_writers`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import secrets
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron.dpp.core import compat
from megatron.dpp.processes import end_with_parent, how_ended

_FILES = "dist_checkpointing.strategies.filesystem_async"
_QUEUE = f"{_FILES}:_results_queue"


@contextlib.contextmanager
def bound_writers(*, in_background: bool) -> Iterator[None]:
    """Let the processes that megatron-core starts for a save end with this one.

    Args:
        in_background: another process writes the results of its writers into the queue.
    """
    results = _shared_queue if in_background else _own_queue
    with (
        compat.patched(f"{_FILES}:_get_write_results_queue", results),
        compat.patched(f"{_FILES}:FileSystemWriterAsync.write_preloaded_data", _bound),
    ):
        yield


def bound_request(request: AsyncRequest) -> AsyncRequest:
    """``request`` for a process of its own that ends, with its writers, with this one."""
    if request.async_fn is None:
        return request
    return request._replace(async_fn=functools.partial(_write_bound, request.async_fn))


def _shared_queue(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if compat.lookup(_QUEUE) is None:
        # An address without a file: nothing of it can be left behind.
        address = f"\0dpp-writers-{os.getpid()}-{secrets.token_hex(4)}"
        manager = SyncManager(address, ctx=multiprocessing.get_context("spawn"))
        manager.start(end_with_parent)
        compat.assign(_QUEUE, manager.Queue())
    return original(*args, **kwargs)


def manager_ended() -> str:
    """Text about the manager of the queue of results if it has ended, as a save then fails with an
    EOFError without a text; else empty."""
    results = compat.lookup(_QUEUE)
    process = getattr(getattr(results, "_manager", None), "_process", None)  # the proxy keeps both
    if process is None or process.is_alive():
        return ""
    how = how_ended(process.exitcode)
    return f"process {process.pid}, which manages the writers' results, {how}"


def _own_queue(_: Callable[..., Any]) -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


def _bound(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    end_with_parent()
    original(*args, **kwargs)


def _write_bound(write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    end_with_parent()
    with bound_writers(in_background=True):
        write(*args, **kwargs)
