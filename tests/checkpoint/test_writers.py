"""Processes that write a checkpoint end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron.dpp import processes
from megatron.dpp_train.checkpoint import writers


def _ends_with(parent: int | None) -> None:
    """Ask to end with process ``parent``, which ``multiprocessing`` says has started this one."""
    known = None if parent is None else SimpleNamespace(pid=parent)
    processes.multiprocessing.parent_process = lambda: known  # type: ignore[attr-defined,assignment]
    processes.end_with_parent()
    os._exit(3)


@pytest.mark.parametrize(("known", "status"), [(0, 3), (1, -signal.SIGKILL), (None, 3)])
def test_a_process_whose_parent_has_ended_already_ends_now(known: int | None, status: int) -> None:
    """The kernel tells of an end after the request alone. A rank has no such parent."""
    parent = None if known is None else os.getpid() + known
    child = multiprocessing.get_context("fork").Process(target=_ends_with, args=(parent,))
    child.start()
    child.join(30)
    assert child.exitcode == status


class Manager:
    """A manager process that was only asked to start."""

    started: list[Any]

    def __init__(self, address: str, ctx: Any) -> None:
        assert address.startswith("\0"), "a file would be left behind"
        assert ctx.get_start_method() == "spawn"

    def start(self, initializer: Any) -> None:
        self.started.append(initializer)

    def Queue(self) -> str:
        return "the manager's"


def test_a_save_in_the_background_has_one_manager_that_ends_with_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All saves share it; a save that the rank waits for needs none."""
    Manager.started = []
    monkeypatch.setattr(writers, "SyncManager", Manager)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    for _ in range(2):
        with writers.bound_writers(in_background=False):
            own = filesystem_async._get_write_results_queue()
        assert isinstance(own, queue.SimpleQueue) and not Manager.started
    for _ in range(2):
        with writers.bound_writers(in_background=True):
            assert filesystem_async._get_write_results_queue() == "the manager's"
    assert Manager.started == [processes.end_with_parent]


@pytest.mark.parametrize("in_background", [True, False])
def test_every_writer_ends_with_the_process_that_started_it(
    in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    kind, name = filesystem_async.FileSystemWriterAsync, "write_preloaded_data"
    monkeypatch.setattr(writers, "end_with_parent", lambda: told.append("bound"))
    monkeypatch.setattr(
        kind, name, staticmethod(lambda *given, **more: told.append(f"{given} {more}"))
    )
    with writers.bound_writers(in_background=in_background):
        kind.write_preloaded_data(1, files=2)
    assert told == ["bound", "(1,) {'files': 2}"]


def test_a_request_binds_its_process_and_the_writers_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(writers, "end_with_parent", lambda: told.append("bound"))
    monkeypatch.setattr(filesystem_async, "_results_queue", "the rank's")

    def write(name: str, *, sums: int) -> None:
        told.append(f"{name} {sums} into {filesystem_async._get_write_results_queue()}")

    request = AsyncRequest(write, ("a",), [], async_fn_kwargs={"sums": 3})
    bound = writers.bound_request(request)
    assert bound.async_fn is not None and not told
    bound.async_fn(*bound.async_fn_args, **bound.async_fn_kwargs)
    assert told == ["bound", "a 3 into the rank's"]
    nothing = AsyncRequest(None, (), [])
    assert writers.bound_request(nothing) is nothing
