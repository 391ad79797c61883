"""Facts, tokens and connections of set-up tests, and two ranks that open over a store."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import TransportError
from megatron.dpp.transport import ChannelSpec, TransportOptions, open_transport
from megatron.dpp.transport.handshake import Connection, Guest
from megatron.dpp.transport.joining import Facts, PeerLink
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.messages import receive_message, send_message
from tests.transport.kinds import PATIENCE, of_rank, pair, prepared

TOKEN = b"0123456789abcdef"
Ends = tuple[socket.socket, socket.socket]


def facts(rank: int, **changes: Any) -> Facts:
    """The facts of a rank with a GPU; all ranks are on one host."""
    fields = {
        "rank": rank, "abi": 1, "host": "h", "hostname": f"node{rank}", "uid": 7, "pid": 1,
        "device": "cuda", "unix_address": "", "tcp_address": ["10.0.0.1", 1], "token": "t",
        "settings": {}, "gpu": f"gpu{rank}",
    }  # fmt: skip
    return Facts(**{**fields, **changes})


def link_of(rank: int, sock: socket.socket) -> PeerLink:
    """The link of rank 0 or 1 with the other one."""
    return PeerLink(rank=rank, peer=1 - rank, sock=sock, incoming=[rank], outgoing=[1 - rank])


@contextlib.contextmanager
def connected(kind: int = socket.SOCK_SEQPACKET) -> Iterator[Ends]:
    """Two ends of a unix connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(PATIENCE)
        yield ours, theirs


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two ends of a connection, of packets unless ``request.param`` says otherwise."""
    with connected(getattr(request, "param", socket.SOCK_SEQPACKET)) as made:
        yield made


def accept(sock: socket.socket, token: bytes, rank: int) -> tuple[int, str]:
    """Let a connector in that proves itself; its rank and its purpose."""
    guest, answer = Guest(Connection(-1, "", sock)), dict[str, Any]()
    while "welcome" not in answer:
        answer = guest.answer(receive_message(sock)[0], token, rank)
        send_message(sock, answer)
    return guest.connection.peer, guest.connection.purpose


def token_file(folder: Path, content: bytes = TOKEN, name: str = "token") -> Path:
    """A private file with a secret."""
    path = folder / name
    path.touch(0o600)
    path.write_bytes(content)
    return path


def met(store: Any, rank: int, tcp_host: str | None = None, **options: Any) -> Meeting:
    """A rank that meets others."""
    given = {"setup_timeout": PATIENCE, **options}
    return Meeting(store, rank, TransportOptions(**given), tcp_host)


def both(act: Callable[[int], Any]) -> dict[int, Any]:
    """Results of ``act`` of rank 0 and of rank 1, or their transport's errors, side by side."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except (TransportError, ValueError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return found


def errors_of(
    kind: str,
    patience: float = PATIENCE,
    channels: Sequence[Sequence[ChannelSpec]] | None = None,
    options: Sequence[dict[str, Any]] = ({}, {}),
    store: Any = None,
    seconds: float = PATIENCE,
) -> dict[int, Any]:
    """Errors of opening, or of waiting for so many seconds, by rank; None without one.

    Args:
        patience: for the set-up.
        channels: of rank 0 and of rank 1.
        options: likewise.
        seconds: that a rank waits once it has opened.
    """
    found, place = channels or [of_rank(pair(), rank) for rank in range(2)], store or HashStore()

    def run(rank: int) -> None:
        settings = TransportOptions(**{"setup_timeout": patience, **options[rank]})
        with open_transport(
            found[rank], rank=rank, store=place, kind=kind, options=settings
        ) as end:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                end.poll()
                end.wait(0.2)

    with prepared(kind):
        return both(run)


def open_both(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    bother: Callable[[Meeting], None] = lambda meeting: None,
    patience: float = PATIENCE,
) -> dict[int, Any]:
    """Errors of opening and closing two ranks, None without one; ``bother`` runs with the meeting
    of rank 1, before anybody connects.
    """
    bothered, original = threading.Event(), Meeting.connect

    def connect(self: Meeting, wanted: Any) -> Any:
        if self._rank == 1:
            bother(self)
            bothered.set()
        assert bothered.wait(PATIENCE)
        return original(self, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "connect", connect)
        return errors_of(kind, patience, seconds=0.0)


NONE = {0: None, 1: None}


def num_open() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def descriptors_and_threads() -> tuple[int, int]:
    """Those of this process."""
    return num_open(), len(os.listdir("/proc/self/task"))


def leaked(before: tuple[int, int]) -> tuple[int, int]:
    """Leaked descriptors and threads. The kernel lists a thread for a moment after its join."""
    for _ in range(100):
        after = descriptors_and_threads()
        if after <= before:
            break
        time.sleep(0.01)
    return after[0] - before[0], after[1] - before[1]


def census() -> tuple[int, int]:
    """Sockets and threads of this process."""
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(each.startswith("socket:") for each in links), len(os.listdir("/proc/self/task"))


def until_no_more_than(most: tuple[int, int]) -> None:
    """Until there are at most so many: the kernel lists a thread for a moment after its join."""
    deadline = time.monotonic() + PATIENCE
    while (now := census()) != (min(now[0], most[0]), min(now[1], most[1])):
        assert time.monotonic() < deadline, f"{now} where {most} are usual"
        time.sleep(0.01)
