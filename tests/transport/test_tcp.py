"""States of a peer that a TCP connection reports: gone, unreachable, stopped, closed in order."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.native import load_native
from tests.transport.kinds import (
    PATIENCE,
    close_and_wait,
    forked,
    open_from_file,
    opened,
    pair,
    take_next,
    until_failure,
)
from tests.transport.raw import resident

MIB = 1 << 20


@contextlib.contextmanager
def remembered() -> Iterator[dict[tuple[int, int, str], socket.socket]]:
    """Second descriptors of the connections made within, by rank, peer and purpose."""
    found: dict[tuple[int, int, str], socket.socket] = {}
    original = Meeting.connect

    def remember(self: Meeting, wanted: Any) -> Any:
        made = original(self, wanted)
        for (peer, purpose), connection in made.items():
            found[self._rank, peer, purpose] = connection.sock.dup()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "connect", remember)
        try:
            yield found
        finally:
            for sock in found.values():
                sock.close()


def close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def reset(sock: socket.socket) -> None:
    """Both ends see a reset, as when something between the hosts has forgotten the connection."""
    nowhere = (ctypes.c_uint16 * 8)(socket.AF_UNSPEC)
    assert ctypes.CDLL(None).connect(sock.fileno(), nowhere, ctypes.sizeof(nowhere)) == 0


@pytest.mark.parametrize("end", [close, reset])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_data_connection_that_ends_is_noticed_on_both_sides(end: Any, rank: int) -> None:
    with remembered() as connections, opened("tcp", pair(MIB)) as (a, b):
        end(connections[rank, 1 - rank, "data 0"])
        with contextlib.suppress(PeerDead):
            a.put(0, torch.ones(MIB, dtype=torch.uint8), iteration=0, microbatch=0)
        errors = [until_failure(transport) for transport in (a, b)]
    assert all(type(error) is PeerDead for error in errors), errors
    assert any("a data connection" in str(error) for error in errors), errors


def test_a_peer_that_closes_in_the_middle_of_a_message_has_left_in_good_order() -> None:
    large = torch.ones(8 * MIB, dtype=torch.uint8)
    with opened("tcp", pair(large.nbytes)) as (a, b):
        for channel in (0, 1):
            for index in range(2):
                a.put(channel, large, iteration=0, microbatch=index)
        close_and_wait(b, a)
        until = time.monotonic() + 1.5  # longer than a goodbye may be late
        while time.monotonic() < until:
            a.poll()
            a.wait(0.1)


def test_what_was_flushed_arrives_although_the_peer_sends_into_the_closed_connection() -> None:
    large = torch.arange(8 * MIB).to(torch.uint8)
    with opened("tcp", pair(large.nbytes)) as (a, b):
        for index in range(4):  # twice what the slots hold: the rest meets the closed sockets
            b.put(0, large, iteration=0, microbatch=index)
        a.put(0, large, iteration=0, microbatch=0)
        a.flush(PATIENCE)
        a.close()
        assert torch.equal(take_next(b, 0, 0).tensor, large)
        while not b.departed(0):
            b.wait(0.1)
            b.poll()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_receiver_that_is_stopped_is_not_dead(kind: str, tmp_path: Path) -> None:
    large = torch.ones(32 * MIB, dtype=torch.uint8)  # more than the kernels hold

    def body(rank: int, path: str, results: Any) -> None:
        names = [tmp_path / f"pid{rank}" for rank in range(2)]
        names[rank].write_text(str(os.getpid()))
        # A short one, so that the receiver needs to be stopped for a second only.
        transport = open_from_file(kind, pair(large.nbytes), rank, path, peer_timeout=0.3)
        if rank == 1:
            results.put((1, float(take_next(transport, 0, 0).tensor.sum())))
            transport.wait(PATIENCE)  # until the other one leaves
            return
        other = int(names[1].read_text())
        os.kill(other, signal.SIGSTOP)
        try:
            while not is_stopped(other):
                time.sleep(0.01)
            transport.put(0, large, iteration=0, microbatch=0)
            until = time.monotonic() + (1.5 if kind == "tcp" else 0.2)
            while time.monotonic() < until:
                transport.poll()
                transport.wait(0.1)
            overdue = str(transport.overdue(0, 1.5, iteration=0, microbatch=0))
        finally:
            os.kill(other, signal.SIGCONT)
        transport.flush(PATIENCE)
        results.put((0, overdue))
        transport.close()

    with forked(2, body, tmp_path) as (_, results):
        found = dict(results.get(timeout=PATIENCE) for _ in range(2))
    assert "of rank 1 is stopped on" in found[0]
    assert found[1] == large.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_large_tensor_is_the_memory_it_arrived_in(dtype: torch.dtype) -> None:
    """Later messages do not write there, nor does the end of the transport take it."""
    sent = [(torch.arange(MIB) % (index + 2)).to(dtype).view(2, -1) for index in range(7)]
    with opened("tcp", pair(sent[0].nbytes), checksum=True) as (a, b):
        taken = []
        for index, tensor in enumerate(sent):
            a.put(0, tensor, iteration=0, microbatch=index)
            taken.append(take_next(b, 0, index).tensor)
        first, middle = taken[0].data_ptr(), taken.pop(3)
        assert not middle._is_view() and middle.untyped_storage().nbytes() == middle.nbytes
        middle.fill_(1)  # it is the caller's alone
        del middle
    assert taken[0].data_ptr() == first
    for tensor, expected in zip(taken, [*sent[:3], *sent[4:]], strict=True):
        assert tensor.shape == expected.shape and torch.equal(tensor, expected)
    if dtype.is_floating_point:
        (taken[0].requires_grad_() * 2).sum().backward()
        assert float(taken[0].grad[0, 0]) == 2.0


def test_memory_that_was_given_away_comes_back() -> None:
    large = torch.ones(16 * MIB, dtype=torch.uint8)
    with opened("tcp", pair(large.nbytes)) as (a, b):
        found = []
        for index in range(12):
            a.put(0, large, iteration=0, microbatch=index)
            take_next(b, 0, index)
            found.append(resident())
        assert found[-1] - found[3] < 4 * large.nbytes
        taken = []
        for index in range(12, 24):
            a.put(0, large, iteration=0, microbatch=index)
            taken.append(take_next(b, 0, index))
        most = resident()
        taken.clear()  # a channel keeps twice as much as its slots have
        assert resident() < most - 7 * large.nbytes


def test_a_message_much_shorter_than_its_slot_is_copied() -> None:
    with opened("tcp", pair(8 * MIB)) as (a, b):
        a.put(0, torch.arange(MIB, dtype=torch.uint8), iteration=0, microbatch=0)
        message = take_next(b, 0, 0)
        assert torch.equal(message.tensor, torch.arange(MIB, dtype=torch.uint8))
        for index in range(1, 4):
            a.put(0, torch.full((8 * MIB,), index, dtype=torch.uint8), iteration=0, microbatch=0)
            assert int(take_next(b, 0, index).tensor[-1]) == index
        assert torch.equal(message.tensor, torch.arange(MIB, dtype=torch.uint8))


def test_a_large_payload_that_was_torn_is_found_by_its_checksum() -> None:
    large = torch.ones(MIB, dtype=torch.uint8)
    with opened("tcp", pair(MIB, depth=1), checksum=True) as (a, b):
        a.put(0, large, iteration=0, microbatch=0)
        second = large.clone()
        a.put(0, second, iteration=0, microbatch=7)  # waits for the only slot
        second[5] = 0
        assert take_next(b, 0, 0).microbatch == 0
        with pytest.raises(ProtocolError, match="checksum of microbatch 7"):
            take_next(b, 0, 1)


@pytest.mark.parametrize("connections", [1, 3, 16])
def test_a_large_message_is_spread_over_the_connections_asked_for(connections: int) -> None:
    large = torch.arange(5 * MIB).to(torch.uint8)  # no multiple of the share of three
    with (
        remembered() as made,
        opened("tcp", pair(large.nbytes), tcp_connections=connections) as (a, b),
    ):
        a.put(0, large, iteration=0, microbatch=0)
        assert torch.equal(take_next(b, 0, 0).tensor, large)
        assert sum(purpose.startswith("data") for _, _, purpose in made) == 2 * connections


def test_other_threads_run_while_the_slots_of_a_link_are_made() -> None:
    """Their pages take most of a second per GiB. A thread that counts runs only while another one
    gives Python's lock away."""
    turns, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    native = load_native().Transport(
        rank=0, timeout=1.0, checksum=False, max_pending=16, spin=False, outgoing=[],
        incoming=[(1, 0, 0, 0, 64 * MIB, 2)],
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    data, other = socket.socketpair()
    native.add_peer(1, "rank 1", ours.detach(), -1, -1)
    before, thread = sys.getswitchinterval(), threading.Thread(target=work)
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        counted = turns[0]
        with theirs, other:
            native.add_tcp_link(1, [0], [], [data.detach()])
            assert turns[0] > counted
            native.close()
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()
