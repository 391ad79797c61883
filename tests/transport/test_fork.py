"""Forked children, such as data loaders' workers, that outlive or take apart what they inherit."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import PeerDead
from megatron.dpp.transport import open_transport
from tests.transport.kinds import (
    PATIENCE,
    fake_verbs,
    forked,
    inheritance_kept,
    of_rank,
    open_from_file,
    pair,
    take_next,
)


def wait_for_number(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_child_does_not_keep_a_dead_rank_alive(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("another PID namespace")

    monkeypatch.setattr(os, "pidfd_open", refuse)  # the end of the socket has to do

    def body(rank: int, path: str, results: Any) -> None:
        transport = open_from_file(kind, pair(), rank, path)
        if rank == 1:
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE))
                signal.pause()
            # Not through the queue, whose lock this rank may hold when it is killed.
            (tmp_path / "new").write_text(str(child))
            (tmp_path / "new").rename(tmp_path / "child")
            time.sleep(PATIENCE)
        try:
            while True:
                transport.poll()
                transport.wait(PATIENCE)
        except PeerDead as error:
            results.put(str(error))

    with forked(2, body, tmp_path) as (processes, results):
        child = wait_for_number(tmp_path / "child")
        try:
            assert processes[1].pid is not None
            os.kill(processes[1].pid, signal.SIGKILL)
            text = results.get(timeout=PATIENCE / 2)
        finally:
            os.kill(child, signal.SIGKILL)
    assert "rank 1 (pid" in text and "died" in text


def test_a_child_that_frees_what_it_inherits_leaves_the_network_card_alone() -> None:
    card, store = fake_verbs(), HashStore()

    def open_one(rank: int) -> Any:
        return open_transport(of_rank(pair(), rank), rank=rank, store=store, kind="rdma")

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(open_one, range(2)))
    before = card.fake_verbs_objects()
    assert before > 0
    with inheritance_kept():
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            ends[0].close()
            ends.clear()
            os._exit(0 if card.fake_verbs_objects() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    a, b = ends
    a.put(0, torch.ones(3), iteration=0, microbatch=0)
    assert take_next(b, 0, 0).microbatch == 0
    for end in ends:
        end.close()
