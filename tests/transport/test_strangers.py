"""Strangers at a listener, and true peers that are turned down, come again, or are named."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import AuthError, SetupError, TransportError
from megatron.dpp.transport import handshake, meet
from megatron.dpp.transport.handshake import Connection
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.messages import PeerEnded, receive_message
from tests.transport import stranger
from tests.transport.kinds import PATIENCE
from tests.transport.meeting import (
    TOKEN,
    census,
    connected,
    facts,
    met,
    none_failed,
    open_both,
    token_file,
    until_no_more_than,
)  # fmt: skip

OTHER_USER = 65534


def knock(kind: str, meeting: Meeting, hello: bytes = b"") -> socket.socket:
    """A stranger's connection."""
    if kind == "tcp":
        assert meeting.tcp_address is not None
        caller = socket.create_connection(meeting.tcp_address)
    else:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect("\0" + meeting.unix_address)
    if hello:
        caller.send(hello)
    return caller


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_crowd_that_says_nothing_keeps_no_place_and_is_hung_up_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_PROOFS", 8)
    crowd: list[socket.socket] = []

    def bother(meeting: Meeting) -> None:
        for _ in range(50):  # a backlog of them
            knock(kind, meeting, b"\x05\x00hello").close()
        crowd.extend(knock(kind, meeting) for _ in range(60))

    none_failed(open_both(kind, monkeypatch, bother))
    for caller in crowd:
        caller.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(4096) == b""
        caller.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dpp-proof"]


@contextlib.contextmanager
def bothered(kind: str, *ways: Sequence[str]) -> Iterator[Callable[[Meeting], None]]:
    """A ``bother`` for :func:`open_both`: a process of stranger.py for each of ``ways``, until the
    end of the block.
    """
    programs: list[subprocess.Popen[bytes]] = []

    def bother(meeting: Meeting) -> None:
        host = meeting.tcp_address
        address = f"{host[0]}:{host[1]}" if kind == "tcp" and host else meeting.unix_address
        for way in ways:
            words = [sys.executable, "-S", stranger.__file__, address, *way]
            programs.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        for program in programs:
            assert program.stdout is not None and program.stdout.readline() == b"ready\n"

    try:
        yield bother
    finally:
        for program in programs:
            program.kill()
            program.communicate()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_connections_that_drip_end_with_the_set_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more sockets and threads stay than after a quiet start."""
    quiet: list[tuple[int, int]] = []
    open_both(kind, monkeypatch, look=lambda: quiet.append(census()))
    closed = census()
    with bothered(kind, ["drip"]) as bother:
        found = open_both(kind, monkeypatch, bother, lambda: until_no_more_than(quiet[0]))
        until_no_more_than(closed)
    none_failed(found)


@pytest.mark.parametrize(
    "number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))]
)
def test_a_start_succeeds_among_strangers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over shm or tcp, while three processes connect, one of another user."""
    kind = ("shm", "tcp")[number % 2]
    other = ["flood", *(["--user", str(OTHER_USER)] if os.getuid() == 0 else [])]
    with bothered(kind, ["flood"], ["drip"], other) as bother:
        none_failed(open_both(kind, monkeypatch, bother))


# A true peer that is turned down ------------------------------------------------------------------


class Reaching:
    """A rank that reaches for rank 5, which is the test; it waits before it says anything."""

    def __init__(
        self, kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path, patience: float = PATIENCE
    ) -> None:
        self.speak = threading.Semaphore(0)
        name = f"dpp-test-{time.monotonic_ns()}"
        if kind == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.peer = facts(5, tcp_address=self.listener.getsockname())
        else:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.listener.bind("\0" + name)
            self.listener.listen(8)
            self.peer = facts(5, unix_address=name)
        self.listener.settimeout(PATIENCE)
        self._wanted = [(self.peer, "control", kind == "tcp")]
        monkeypatch.setattr(meet, "identify", self._wait)
        self.found: Any = None
        secret = str(token_file(folder))
        self.rank = met(HashStore(), 4, setup_timeout=patience, token_file=secret)
        self._thread = threading.Thread(target=self._reach)
        self._thread.start()

    def _wait(self, *_: Any) -> None:
        assert self.speak.acquire(timeout=PATIENCE)

    def _reach(self) -> None:
        try:
            with self.rank:
                (self.found,) = self.rank.connect(self._wanted).values()
        except TransportError as error:
            self.found = error

    def accept(self) -> socket.socket:
        sock, _ = self.listener.accept()
        sock.settimeout(PATIENCE)
        return sock

    def result(self) -> Any:
        """The connection, or the error."""
        self._thread.join(PATIENCE)
        return self.found

    def close(self) -> None:
        self.speak.release(1000)
        self.listener.close()
        self._thread.join(PATIENCE)
        if isinstance(self.found, Connection):
            self.found.close()


@pytest.fixture(params=["shm", "tcp"])
def reaching(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Reaching]:
    made = Reaching(request.param, monkeypatch, tmp_path)
    yield made
    made.close()


def reset(sock: socket.socket) -> None:
    """As a TCP connection that is closed before all was read."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


WAYS = {"away": handshake.send_away, "reset": reset}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["before the hello", "after the hello", "before the welcome"])
def test_a_true_peer_that_is_turned_down_comes_again(
    way: str, moment: str, reaching: Reaching
) -> None:
    for _ in range(2):
        sock = reaching.accept()
        if moment != "before the hello":
            reaching.speak.release()
        if moment == "after the hello":
            receive_message(sock)
        elif moment == "before the welcome":
            with pytest.raises(handshake.SentAway):
                handshake.accept_side(sock, TOKEN, 5, lambda: False)
        WAYS[way](sock)
        sock.close()
        if moment == "before the hello":
            reaching.speak.release()
    with reaching.accept() as sock:
        reaching.speak.release()
        assert handshake.accept_side(sock, TOKEN, 5) == (4, "control")
    assert isinstance(reaching.result(), Connection)


def test_another_token_is_an_error_at_once(reaching: Reaching) -> None:
    with reaching.accept() as sock:
        reaching.speak.release()
        with pytest.raises((AuthError, PeerEnded)):
            handshake.accept_side(sock, b"another job's secret", 5)
    error = reaching.result()
    assert type(error) is AuthError
    assert "what listens as rank 5 does not know this job's token" in str(error)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_peer_that_lets_nobody_in_is_named_at_the_deadline(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reaching = Reaching(kind, monkeypatch, tmp_path, 0.2)
    reaching.speak.release(1000)
    reaching.listener.settimeout(0.5)
    with pytest.raises(TimeoutError):
        while True:
            reaching.listener.accept()[0].close()
    error = reaching.result()
    assert type(error) is SetupError and "rank 4: cannot reach rank 5 on" in str(error)
    reaching.close()


def no_thread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first three proofs find no thread; returns how many are still to fail."""
    start, left = threading.Thread.start, [3]

    def start_later(self: threading.Thread) -> None:
        if self.name == "dpp-proof" and left[0] > 0:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    return left


def no_listener(monkeypatch: pytest.MonkeyPatch, refusal: type[OSError]) -> list[int]:
    """The first three connections are refused."""
    connect, left = socket.socket.connect, [3]

    def connect_later(self: socket.socket, address: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise refusal
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_later)
    return left


def no_descriptor(monkeypatch: pytest.MonkeyPatch, times: int = 3) -> list[int]:
    """The first ``times`` connections cannot be accepted."""
    accept, left = socket.socket.accept, [times]

    def fall_short(self: socket.socket) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fall_short)
    return left


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize(
    "lack",
    [no_thread, no_descriptor, lambda patch: no_listener(patch, BlockingIOError),
     lambda patch: no_listener(patch, ConnectionRefusedError)],
    ids=["thread", "descriptor", "backlog", "listener"],
)  # fmt: skip
def test_what_lacks_at_first_is_survived(
    kind: str, lack: Callable[[pytest.MonkeyPatch], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = lack(monkeypatch)
    none_failed(open_both(kind, monkeypatch))
    assert left == [0]


def test_a_shortage_that_lasts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no_descriptor(monkeypatch, 1 << 30)
    found = open_both("shm", monkeypatch, setup_timeout=1.0)
    assert type(found[0]) is type(found[1]) is SetupError
    assert "Too many open files" in str(found[1]) and "ulimit -n" in str(found[1])


def test_a_guest_that_nobody_waits_for_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job's own ranks too: a second connection of one name, and one that no link has."""
    names = [(9, "control"), (2, "control"), (2, "data 0"), (2, "control"), (3, "control")]
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connected()) for _ in names]
        guests = [Connection(*name, ends[0]) for name, ends in zip(names, pairs, strict=True)]
        coming = iter([guests[:4], guests[4:]])
        admission = SimpleNamespace(
            proven=lambda: next(coming), crowded=False, accept=lambda: None, close=lambda: None
        )
        monkeypatch.setattr(meet, "Admission", lambda *given: admission)
        one = stack.enter_context(met(HashStore(), 4, token_file=str(token_file(tmp_path))))
        made = one.connect([(facts(rank), "control", False) for rank in (2, 3)])
        assert made == {(2, "control"): guests[1], (3, "control"): guests[4]}
        assert [guest.sock.fileno() >= 0 for guest in guests] == [False, True, False, False, True]
