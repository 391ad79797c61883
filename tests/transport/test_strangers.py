"""Strangers at a rank's listeners: they stop no start, and hold nothing for long."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import AuthError, ProtocolError, SetupError
from megatron.dpp.transport import TransportOptions, admission, handshake, open_transport
from megatron.dpp.transport.admission import Admission
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport import stranger
from tests.transport.kinds import PATIENCE, of_rank, pair

TOKEN = b"0123456789abcdef"
OTHER_USER = 65534


def open_both(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    bother: Callable[[Rendezvous], None],
    look: Callable[[], None] = lambda: None,
    setup_timeout: float = PATIENCE,
) -> dict[int, Any]:
    """Open two ranks; ``bother`` runs with the rendezvous of rank 1, before anybody connects, and
    ``look`` before the transports are closed.
    """
    store, found, bothered = HashStore(), {}, threading.Event()
    original = Rendezvous.connect

    def connect(self: Rendezvous, wanted: Any) -> Any:
        if self._rank == 1:
            bother(self)
            bothered.set()
        assert bothered.wait(PATIENCE)
        return original(self, wanted)

    def open_one(rank: int) -> None:
        options = TransportOptions(setup_timeout=setup_timeout)
        try:
            found[rank] = open_transport(
                of_rank(pair(), rank), rank=rank, store=store, kind=kind, options=options
            )
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Rendezvous, "connect", connect)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
    look()
    for end in found.values():
        if not isinstance(end, Exception):
            end.close()
    return found


def knock(kind: str, rendezvous: Rendezvous, hello: bytes = b"") -> socket.socket:
    """A stranger's connection."""
    if kind == "tcp":
        assert rendezvous.tcp_address is not None
        caller = socket.create_connection(rendezvous.tcp_address)
    else:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect("\0" + rendezvous.unix_address)
    if hello:
        caller.send(hello)
    return caller


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_any_number_of_strangers_costs_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bother(rendezvous: Rendezvous) -> None:
        for _ in range(100):  # a backlog of them
            knock(kind, rendezvous, b"\x05\x00hello").close()

    found = open_both(kind, monkeypatch, bother)
    assert not [end for end in found.values() if isinstance(end, Exception)]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_crowd_that_says_nothing_keeps_no_place_and_is_hung_up_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_PROOFS", 8)
    crowd: list[socket.socket] = []

    def bother(rendezvous: Rendezvous) -> None:
        crowd.extend(knock(kind, rendezvous) for _ in range(60))

    found = open_both(kind, monkeypatch, bother)
    assert not [end for end in found.values() if isinstance(end, Exception)]
    for caller in crowd:
        caller.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            while caller.recv(4096):
                pass  # it is asked to come again
        caller.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dpp-proof"]


def test_a_connection_that_drips_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.5)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stop = threading.Event()

    def drip() -> None:
        theirs.send(b"\xff\x0f")
        with contextlib.suppress(OSError):
            while not stop.wait(0.1):
                theirs.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    patience = threading.Timer(10.0, stop.set)  # 100 bytes: without one deadline for all of them
    patience.start()
    with pytest.raises(ProtocolError, match="no answer in time"), ours:
        handshake.accept_side(ours, TOKEN, 0)
    assert not stop.is_set()
    stop.set()
    patience.cancel()
    thread.join(PATIENCE)
    theirs.close()


@contextlib.contextmanager
def bothered(kind: str, *ways: Sequence[str]) -> Iterator[Callable[[Rendezvous], None]]:
    """A ``bother`` for :func:`open_both`: a process of stranger.py for each of ``ways``, until the
    end of the block.
    """
    programs: list[subprocess.Popen[bytes]] = []

    def bother(rendezvous: Rendezvous) -> None:
        host = rendezvous.tcp_address
        address = f"{host[0]}:{host[1]}" if kind == "tcp" and host else rendezvous.unix_address
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


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_connections_that_drip_end_with_the_set_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more sockets and threads stay than after a quiet start."""
    quiet: list[tuple[int, int]] = []
    open_both(kind, monkeypatch, lambda _: None, lambda: quiet.append(census()))
    closed = census()
    with bothered(kind, ["drip"]) as bother:
        found = open_both(kind, monkeypatch, bother, lambda: until_no_more_than(quiet[0]))
        until_no_more_than(closed)
    assert not [end for end in found.values() if isinstance(end, Exception)]


def start_among_strangers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open two ranks over shm or tcp while three processes connect, one of another user."""
    kind = ("shm", "tcp")[number % 2]
    other = ["flood", *(["--user", str(OTHER_USER)] if os.getuid() == 0 else [])]
    with bothered(kind, ["flood"], ["drip"], other) as bother:
        found = open_both(kind, monkeypatch, bother)
    assert not [end for end in found.values() if isinstance(end, Exception)]


@pytest.mark.parametrize("number", range(2))
def test_a_start_succeeds_among_strangers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start_among_strangers(number, monkeypatch)


@pytest.mark.slow
def test_twenty_starts_succeed_among_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        start_among_strangers(number, monkeypatch)


@contextlib.contextmanager
def admitting() -> Iterator[tuple[Admission, str]]:
    name = f"\0dpp-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(8)
        made = Admission(listener, TOKEN, 0)
        yield made, name
        made.close()


def test_another_users_process_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with admitting() as (ours, name):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(name)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(threading.Thread, "start", None)  # no thread is made for it
        ours.accept()
        assert ours.refused == 1
        with caller:
            assert caller.recv(16) == b""


def test_a_peer_that_is_sent_away_may_come_again() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        handshake.send_away(theirs)
        said, _ = handshake.receive_message(ours)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        handshake.send_message(theirs, said)
        with pytest.raises(handshake.SentAway, match="rank 1 is busy"):
            handshake.connect_side(ours, TOKEN, 0, 1, "control", PATIENCE)


@pytest.mark.parametrize("body", [b"[" * 4000, b'{"rank": 1, "proof": "\\ud800"}'])
def test_no_message_raises_an_untyped_error(body: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        handshake.send_message(theirs, {"rank": 1, "purpose": "control", "nonce": "n"})
        theirs.send(len(body).to_bytes(2, "little") + body)
        with pytest.raises((AuthError, ProtocolError)):
            handshake.accept_side(ours, TOKEN, 0)


@pytest.mark.parametrize("refusal", [BlockingIOError, ConnectionRefusedError])
def test_a_full_or_missing_listener_is_tried_again(
    refusal: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Any] = []
    original = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        tries.append(address)
        if len(tries) < 4:
            raise refusal
        original(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    found = open_both("shm", monkeypatch, lambda _: None)
    assert not [end for end in found.values() if isinstance(end, Exception)]
    assert len(tries) == 4


@pytest.mark.parametrize("failures", [3, 1 << 30])
def test_a_shortage_of_descriptors_is_survived_or_named(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, accept = [failures], socket.socket.accept

    def fall_short(self: socket.socket) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fall_short)
    patience = PATIENCE if failures == 3 else 1.0
    found = open_both("shm", monkeypatch, lambda _: None, setup_timeout=patience)
    if failures == 3:
        assert not [end for end in found.values() if isinstance(end, Exception)]
        return
    assert type(found[1]) is SetupError
    assert "Too many open files" in str(found[1]) and "ulimit -n" in str(found[1])
    assert type(found[0]) is SetupError
