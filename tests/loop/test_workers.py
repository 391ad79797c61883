"""Workers of data loaders."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import socket
import tempfile
import threading
import time
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron.dpp_train.exits import prepare_worker
from tests.runtime.launcher import start, wait

RANK = Path(__file__).with_name("loader_worker.py")
collected: list[int] = []


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        collected.append(1)


class Collecting(torch.utils.data.Dataset[int]):
    """A set whose only item is the number of inherited objects that its reader collected."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return len(collected)


def test_a_worker_collects_nothing_that_it_inherits() -> None:
    """Objects that belong to threads of the rank crashed a worker that collected them."""
    gc.collect()
    collected.clear()
    gc.disable()
    try:
        Loop()
        loader = torch.utils.data.DataLoader(
            Collecting(),
            num_workers=1,
            worker_init_fn=partial(prepare_worker, outlives_sigterm=False),
        )
        assert [int(item) for item in loader] == [0]
    finally:
        gc.enable()
    gc.collect()
    assert collected, "this process still collects it"


class Folders(Collecting):
    """A set whose item says whether its reader gets a folder of its own that is there."""

    def __getitem__(self, index: int) -> int:
        return int(os.path.isdir(multiprocessing.util.get_temp_dir()))


@pytest.mark.parametrize("inherits", [False, True])
def test_a_worker_that_needs_a_folder_gets_a_new_one_and_ends_in_silence(
    inherits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The folder of the socket is gone by then, and an end in good order leaves none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rank: Any = multiprocessing.current_process()
    monkeypatch.setattr(rank, "_config", dict(rank._config))
    rank._config.pop("tempdir", None)
    if inherits:
        (tmp_path / "rank's").mkdir()
        rank._config["tempdir"] = str(tmp_path / "rank's")
    loader = torch.utils.data.DataLoader(
        Folders(), num_workers=1, worker_init_fn=partial(prepare_worker, outlives_sigterm=False)
    )
    assert [int(item) for item in loader] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["rank's"] * inherits
    assert capfd.readouterr().err == ""


def prepare_without_threads(worker: int) -> None:
    """As under a small ``ulimit -u``."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        prepare_worker(worker, outlives_sigterm=False)


def test_a_worker_that_can_have_no_thread_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """``pymp-*`` stayed in the temporary directory for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loader = torch.utils.data.DataLoader(
        Folders(), num_workers=1, worker_init_fn=prepare_without_threads
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(loader)
    assert not list(tmp_path.iterdir()) and capfd.readouterr().err == ""


class Hangups(Collecting):
    """A set whose reader loses one who came for a tensor, as where the rank is killed just then."""

    def __getitem__(self, index: int) -> Any:
        ((address, _),) = vars(resource_sharer.DupFd(0)).values()  # as a tensor's
        with socket.socket(socket.AF_UNIX) as rank:
            rank.connect(address)
        return torch.ones(1 << 16)  # which the same thread hands over


def test_a_worker_says_nothing_of_a_rank_that_is_killed_as_it_fetches_a_tensor(capfd: Any) -> None:
    """Its thread printed a ConnectionResetError, or an EOFError, with a traceback."""
    loader = torch.utils.data.DataLoader(
        Hangups(), num_workers=1, worker_init_fn=partial(prepare_worker, outlives_sigterm=False)
    )
    assert [float(item.sum()) for item in loader] == [1 << 16]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("own", [[], ["own folder"]], ids=["no folder", "own folder"])
def test_a_killed_rank_leaves_no_worker_and_its_workers_no_folder(
    own: list[str], tmp_path: Path
) -> None:
    read, environment = tmp_path / "read", {"TMPDIR": str(tmp_path)}
    (rank,) = start(RANK, 1, [str(read), *own], lambda _: ("", environment))
    try:
        deadline = time.monotonic() + 60
        while not read.exists():
            assert rank.poll() is None and time.monotonic() < deadline, wait([rank], timeout=0)
            time.sleep(0.01)
        workers = psutil.Process(rank.pid).children()
        assert len(workers) == 2
        # While they work there is no folder of theirs that an end could leave.
        assert len(list(tmp_path.glob("pymp-*"))) == len(own)
        rank.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
        assert len(list(tmp_path.glob("pymp-*"))) == len(own)
    finally:
        wait([rank], timeout=0)  # kills its session
