"""Admission: proofs, places of a listener, strangers, and true peers that are turned down."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  another user may not be able to read it later
import errno
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import AuthError, ProtocolError, SetupError
from megatron.dpp.transport import handshake, meet
from megatron.dpp.transport.handshake import Admission, Connection, Guest
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.messages import receive_message, send_message
from tests.transport.kinds import PATIENCE, Results, inheritance_kept, proof_of
from tests.transport.meeting import (
    NONE,
    TOKEN,
    Ends,
    accept,
    both,
    census,
    connected,
    ends,
    facts,
    met,
    open_both,
    token_file,
    until_no_more_than,
)  # fmt: skip

__all__ = ["ends"]

OTHER_USER = 65534
KINDS = ("shm", "tcp")


@pytest.mark.parametrize(
    ("accepts", "token", "text"),
    [(7, TOKEN, ""), (8, TOKEN, "not know this"), (7, TOKEN[::-1], "does not know this job's tok")],
)
def test_both_sides_prove_themselves(accepts: int, token: bytes, text: str, ends: Ends) -> None:
    def act(side: int) -> Any:
        if side:
            return accept(ends[1], TOKEN, accepts)
        try:
            return handshake.connect_side(ends[0], token, 3, 7, "data 1", PATIENCE)
        finally:
            if text:
                ends[0].shutdown(socket.SHUT_RDWR)

    found = both(act)
    if not text:
        assert found == {0: None, 1: (3, "data 1")}
        return
    assert type(found[0]) is AuthError and "rank 3: what listens as rank 7" in str(found[0])
    assert text in str(found[0]) and isinstance(found[1], ProtocolError)


@pytest.mark.parametrize(
    "wrong",
    [
        {"side": "acceptor"}, {"connector": 3}, {"acceptor": 1}, {"first": "m"}, {"second": "m"},
        {"purpose": "q"}, {"token": TOKEN[::-1]}, 7, "", "\N{EURO SIGN}", None, {},
    ],
)  # fmt: skip
def test_a_proof_is_for_one_side_both_ranks_both_nonces_and_one_purpose(
    wrong: Any, ends: Ends
) -> None:
    right = {"connector": 1, "acceptor": 2, "first": "n", "purpose": "p", "token": TOKEN}

    def connect(side: int) -> Any:
        if side:
            return accept(ends[1], TOKEN, 2)
        send_message(ends[0], {"rank": 1, "purpose": "p", "nonce": "n"})
        said, _ = receive_message(ends[0])
        assert said["proof"] == proof_of(side="acceptor", second=said["nonce"], **right)
        proof = wrong
        if isinstance(wrong, dict):
            proof = proof_of(**{"side": "connector", **right, "second": said["nonce"], **wrong})
        send_message(ends[0], {"proof": proof})
        return None

    verdict = both(connect)[1]
    if wrong == {}:
        assert verdict == (1, "p")
    else:
        assert type(verdict) is AuthError and "claims to be rank 1 has a wrong pro" in str(verdict)


@pytest.mark.parametrize(
    ("said", "text"),
    [({"rank": rank}, "a hello without a rank") for rank in (None, "3", True, 3.0)]
    + [({"purpose": value}, "a set-up message without purpose") for value in (None, 7, "x" * 257)]
    + [(b"[" * 4000, "broken"), (b'{"rank": 1, "purpose": "\\ud800"}', "broken")],
)
def test_a_hello_names_a_rank_by_its_number_and_has_short_texts(
    said: Any, text: str, ends: Ends
) -> None:
    if isinstance(said, bytes):
        ends[0].send(len(said).to_bytes(2, "little") + said)
    else:
        send_message(ends[0], {"rank": 3, "purpose": "x" * 256, "nonce": "n", **said})
    with pytest.raises(ProtocolError, match=text):
        accept(ends[1], TOKEN, 0)


@pytest.mark.parametrize("answer", [{}, {"welcome": False}, {"welcome": 1}, {"welcome": "yes"}])
def test_only_a_welcome_lets_a_rank_in(
    answer: dict[str, Any], ends: Ends, monkeypatch: Any
) -> None:
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_hex=lambda _: "n"))
    proof = proof_of("acceptor", 3, 7, "n", "n", "control", TOKEN)
    send_message(ends[1], {"rank": 7, "nonce": "n", "proof": proof})
    send_message(ends[1], answer)
    with pytest.raises(AuthError, match="rank 3: rank 7 did not let us in"):
        handshake.connect_side(ends[0], TOKEN, 3, 7, "control", PATIENCE)


# Places of a listener -----------------------------------------------------------------------------


class Lobby:
    """An admission whose clock is ``now`` seconds ahead, and its callers."""

    def __init__(self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._stack = 0.0, stack
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind("")
        self._listener.listen(8)
        self._listener.setblocking(False)
        self.admission = Admission([self._listener], TOKEN, 0)
        stack.callback(self.admission.close)
        clock = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self.now, sleep=lambda seconds: None
        )
        monkeypatch.setattr(handshake, "time", clock)

    def call(self) -> socket.socket:
        """A caller that has said nothing yet; it was accepted if there was a place."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.enter_context(caller).connect(self._listener.getsockname())
        caller.settimeout(PATIENCE)
        assert self.admission.look(0.0) == []
        return caller


def is_sent_away(caller: socket.socket) -> bool:
    """True for a caller that was hung up on; others have heard nothing."""
    caller.settimeout(0.02)
    try:
        return caller.recv(1) == b""
    except TimeoutError:
        return False


@pytest.fixture
def lobby(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lobby]:
    with contextlib.ExitStack() as stack:
        yield Lobby(stack, monkeypatch)


def test_the_proven_are_handed_over_once_and_the_others_closed(lobby: Lobby) -> None:
    ours = lobby.admission
    silent, proven, other = (lobby.call() for _ in range(3))
    other.sendall(b"\x02\x00[]")
    with ThreadPoolExecutor(1) as pool:
        let_in = pool.submit(handshake.connect_side, proven, TOKEN, 7, 0, "data 1", PATIENCE)
        while not (found := ours.look(0.01)):
            pass
        let_in.result(PATIENCE)
    assert other.recv(1) == b""
    assert [(each.peer, each.purpose) for each in found] == [(7, "data 1")]
    assert found[0].pidfd >= 0 and ours.look(0.0) == [] and ours.refused == 1
    assert not is_sent_away(silent)
    ours.close()
    assert is_sent_away(silent)
    for _ in range(2):
        found[0].close()
        assert found[0].pidfd == -1 and found[0].sock.fileno() == -1


def test_only_old_connections_lose_their_places(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_GUESTS", 2)
    ours, old = lobby.admission, lobby.call()
    lobby.now += 10.0
    ours.look(0.0)
    assert not is_sent_away(old), "there are places"
    new = lobby.call()
    assert is_sent_away(old)
    waits = [lobby.call() for _ in range(2)]
    assert not any(map(is_sent_away, (new, *waits))) and ours.refused == 1
    waits[1].sendall(b"\x02\x00[]")
    ours.look(0.0)
    assert not is_sent_away(waits[1]), "it waits for a place"


def test_another_users_process_is_refused_before_it_is_read(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(handshake, "receive_message", None)
    assert lobby.call().recv(16) == b""
    assert lobby.admission.refused == 1


# Strangers ----------------------------------------------------------------------------------------


Address = str | tuple[str, int]


def address_of(kind: str, meeting: Meeting) -> Address:
    if kind == "tcp":
        host, port = meeting.tcp_address
        return host, port
    return "\0" + meeting.unix_address


def knock(address: Address, hello: bytes = b"") -> socket.socket:
    """A stranger's connection."""
    family = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not isinstance(address, str):
        family = (socket.AF_INET, socket.SOCK_STREAM)
    caller = socket.socket(*family)
    caller.settimeout(0.1)
    try:
        caller.connect(address)
        if hello:
            caller.send(hello)
    except OSError:
        caller.close()
        raise
    return caller


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_that_says_nothing_keeps_no_place_and_is_hung_up_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_GUESTS", 8)
    monkeypatch.setattr(handshake, "GRACE_SECONDS", 0.05)
    crowd: list[socket.socket] = []

    def bother(meeting: Meeting) -> None:
        for _ in range(50):  # a backlog of them
            knock(address_of(kind, meeting), b"\x05\x00hello").close()
        crowd.extend(knock(address_of(kind, meeting)) for _ in range(60))

    assert open_both(kind, monkeypatch, bother) == NONE
    for caller in crowd:
        caller.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(4096) == b""
        caller.close()


def flood(address: Address) -> Iterator[None]:
    """Connect, say something wrong or nothing, and hang up some connections later."""
    kept: list[socket.socket] = []
    while True:
        for hello in (b"", b"\xff", b"\0\0", b"\xff\xff", b"\2\0{}", b"\x0a\0not json!!"):
            with contextlib.suppress(OSError):
                kept.append(knock(address, hello))
            if len(kept) > 20:
                kept.pop(0).close()
            time.sleep(0.0005)
        yield


def drip(address: Address) -> Iterator[None]:
    """Keep 40 connections that send one byte after the other."""
    places: list[socket.socket | None] = [None] * 40
    while True:
        for index, place in enumerate(places):
            try:
                places[index] = place or knock(address)
                places[index].send(b"\5")  # type: ignore[union-attr]
            except BlockingIOError:
                pass
            except OSError:
                places[index] = None
        yield
        time.sleep(0.005)


@contextlib.contextmanager
def bothered(kind: str) -> Iterator[Callable[[Meeting], None]]:
    """A ``bother`` for :func:`open_both`: three processes that connect until the end of the block,
    one of another user.
    """
    addresses, ready, ways = Results(), Results(), (flood, drip, flood)

    def run(number: int) -> None:
        address = addresses.get(PATIENCE)
        if number == 2 and os.getuid() == 0:
            os.setuid(OTHER_USER)
        for turn, _ in enumerate(ways[number](address)):
            if turn == 0:
                ready.put(number)

    def bother(meeting: Meeting) -> None:
        for _ in ways:
            addresses.put(address_of(kind, meeting))
        assert {ready.get(PATIENCE) for _ in ways} == {0, 1, 2}

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(at,), daemon=True) for at in range(len(ways))]
    with inheritance_kept():
        for process in processes:
            process.start()
    try:
        yield bother
    finally:
        for process in processes:
            process.kill()
            process.join()
        for results in (addresses, ready):
            results.close()


@pytest.mark.parametrize(
    "number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))]
)
def test_a_start_succeeds_among_strangers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them stays."""
    kind = KINDS[number % 2]
    open_both(kind, monkeypatch)
    with bothered(kind) as bother:
        quiet = census()
        assert open_both(kind, monkeypatch, bother) == NONE
        until_no_more_than(quiet)


# A true peer that is turned down ------------------------------------------------------------------


@contextlib.contextmanager
def reached_for(kind: str, folder: Path, patience: float = PATIENCE) -> Iterator[Any]:
    """The listener of rank 5, which is the test, and what rank 4 gets that reaches for it."""
    with contextlib.ExitStack() as stack:
        if kind == "tcp":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            peer = facts(5, tcp_address=list(listener.getsockname()))
        else:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind("")
            listener.listen(8)
            peer = facts(5, unix_address=listener.getsockname()[1:].decode())
        secret = str(token_file(folder))
        one = stack.enter_context(met(HashStore(), 4, setup_timeout=patience, token_file=secret))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        yield listener, pool.submit(one.connect, [(peer, "control", kind == "tcp")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("heard", range(3))
def test_a_true_peer_that_is_turned_down_comes_again(
    heard: int, is_reset: bool, kind: str, tmp_path: Path
) -> None:
    """At once, after its hello, and before its welcome."""
    with reached_for(kind, tmp_path) as (listener, reached):
        for _ in range(2):
            with listener.accept()[0] as sock:
                guest = Guest(Connection(-1, "", sock))
                for number in range(heard):
                    answer = guest.answer(receive_message(sock)[0], TOKEN, 5)
                    if number + 1 < heard:
                        send_message(sock, answer)
                if is_reset and kind == "tcp":  # as if it was closed before all was read
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with listener.accept()[0] as sock:
            assert accept(sock, TOKEN, 5) == (4, "control")
            (found,) = reached.result(PATIENCE).values()
            found.close()


def test_another_token_is_an_error_at_once(tmp_path: Path) -> None:
    with reached_for("tcp", tmp_path) as (listener, reached), listener.accept()[0] as sock:
        with pytest.raises((AuthError, ProtocolError)):
            accept(sock, b"another job's secret", 5)
        with pytest.raises(AuthError, match="listens as rank 5 does not know this job's token"):
            reached.result(PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_lets_nobody_in_is_named_at_the_deadline(kind: str, tmp_path: Path) -> None:
    with reached_for(kind, tmp_path, 0.2) as (listener, reached):
        listener.settimeout(0.02)
        while not reached.done():
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
        with pytest.raises(SetupError, match="rank 4: cannot reach rank 5 on"):
            reached.result()


def fails_first(
    monkeypatch: pytest.MonkeyPatch, call: str, error: Callable[[], OSError], times: int = 3
) -> list[OSError]:
    """A call of sockets fails so many times; returns the errors that are still to come."""
    original, left = getattr(socket.socket, call), [error() for _ in range(times)]

    def fall_short(self: socket.socket, *given: Any) -> Any:
        if left:
            raise left.pop()
        return original(self, *given)

    monkeypatch.setattr(socket.socket, call, fall_short)
    return left


def no_descriptor() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "error"),
    [("accept", no_descriptor), ("connect", BlockingIOError), ("connect", ConnectionRefusedError)],
)
def test_what_lacks_at_first_is_survived(
    call: str, error: Callable[[], OSError], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fails_first(monkeypatch, call, error)
    assert open_both(kind, monkeypatch) == NONE
    assert not left


def test_a_shortage_that_lasts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_first(monkeypatch, "accept", no_descriptor, 10_000)
    found = open_both("shm", monkeypatch, patience=1.0)
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
        admission = SimpleNamespace(look=lambda seconds: next(coming), close=lambda: None)
        monkeypatch.setattr(meet, "Admission", lambda *given: admission)
        one = stack.enter_context(met(HashStore(), 4, token_file=str(token_file(tmp_path))))
        made = one.connect([(facts(rank), "control", False) for rank in (2, 3)])
        assert made == {(2, "control"): guests[1], (3, "control"): guests[4]}
        assert [guest.sock.fileno() >= 0 for guest in guests] == [False, True, False, False, True]
