"""The costs of opening links to the rest of the process: its lock, and its heap."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.dpp.transport.base import Direction
from megatron.dpp.transport.native import load_native

MIB = 1 << 20


@pytest.fixture
def turns() -> Iterator[list[int]]:
    """Counts in a thread, which runs only while another one gives Python's lock away."""
    count, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def made(slot_bytes: int) -> Any:
    specs = [(1, 0, 0, int(Direction.FORWARD), slot_bytes, 2)]
    return load_native().Transport(
        rank=0, timeout=1.0, checksum=False, max_pending=16, spin=False, incoming=specs,
        outgoing=[],
    )  # fmt: skip


def test_other_threads_run_while_the_slots_of_a_tcp_link_are_made(turns: list[int]) -> None:
    """Their pages took 46 of 53 s with slots of 512 MiB, in which no other thread ran."""
    ours, theirs = socket.socketpair()
    data, other = socket.socketpair()
    with theirs, other:
        native = made(64 * MIB)
        native.add_peer(1, "rank 1", ours.detach(), -1, -1)
        before = turns[0]
        native.add_tcp_link(1, [0], [], [data.detach()])
        assert turns[0] > before
        native.close()
