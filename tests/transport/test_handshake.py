"""Admission: proofs, places of a listener, strangers, and true peers that are turned down."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.errors import AuthError, ProtocolError
from megatron.dpp.transport import handshake
from megatron.dpp.transport.handshake import Admission, Connection
from megatron.dpp.transport.messages import receive_message, send_message
from tests.transport.kinds import PATIENCE, proof_of
from tests.transport.meeting import (
    TOKEN,
    Ends,
    both,
    ends,
)  # fmt: skip

__all__ = ["ends"]

OTHER_USER = 65534


@pytest.mark.parametrize(
    ("accepts", "token", "text"),
    [(7, TOKEN, ""), (8, TOKEN, "not know this"), (7, TOKEN[::-1], "does not know this job's tok")],
)
def test_both_sides_prove_themselves(accepts: int, token: bytes, text: str, ends: Ends) -> None:
    def act(side: int) -> Any:
        if side:
            return handshake.accept_side(ends[1], TOKEN, accepts)
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
            return handshake.accept_side(ends[1], TOKEN, 2)
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
        handshake.accept_side(ends[1], TOKEN, 0)


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


@pytest.mark.parametrize("ends", [socket.SOCK_STREAM], indirect=True)
def test_a_connection_that_drips_has_one_deadline(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.5)
    stop = threading.Event()

    def drip() -> None:
        ends[1].send(b"\xff\x0f")
        with contextlib.suppress(OSError):
            while not stop.wait(0.1):
                ends[1].send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    patience = threading.Timer(10.0, stop.set)  # 100 bytes: without one deadline for all of them
    patience.start()
    with pytest.raises(ProtocolError, match="no answer in time"):
        handshake.accept_side(ends[0], TOKEN, 0)
    assert not stop.is_set()
    stop.set()
    patience.cancel()
    thread.join(PATIENCE)


# Places of a listener -----------------------------------------------------------------------------


class Lobby:
    """An admission whose clock is ``now`` seconds ahead, and its callers."""

    def __init__(self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.short_of, self._stack = 0.0, 0, stack
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind("")
        self._listener.listen(8)
        self.admission = Admission(self, TOKEN, 0)  # type: ignore[arg-type]
        stack.callback(self.admission.close)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.now)
        monkeypatch.setattr(handshake, "time", clock)

    def setblocking(self, flag: bool) -> None:
        self._listener.setblocking(flag)

    def accept(self) -> Any:
        if self.short_of:
            raise OSError(self.short_of, os.strerror(self.short_of))
        return self._listener.accept()

    def call(self) -> socket.socket:
        """A caller that has said nothing yet; it was accepted if there was a place."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.enter_context(caller).connect(self._listener.getsockname())
        caller.settimeout(PATIENCE)
        self.admission.accept()
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


def until_proven(ours: Admission, refused: int = 0) -> list[Connection]:
    deadline, found = time.monotonic() + PATIENCE, []
    while not found or ours.refused < refused:
        assert time.monotonic() < deadline
        found += ours.proven()
        time.sleep(0.001)
    return found


def test_the_proven_are_handed_over_once_and_the_others_closed(lobby: Lobby) -> None:
    ours = lobby.admission
    silent, proven, other = (lobby.call() for _ in range(3))
    other.sendall(b"\x02\x00[]")
    handshake.connect_side(proven, TOKEN, 7, 0, "data 1", PATIENCE)
    (found,) = until_proven(ours, refused=1)
    assert other.recv(1) == b""
    assert (found.peer, found.purpose) == (7, "data 1") and found.pidfd >= 0
    assert ours.proven() == [] and ours.refused == 1 and not is_sent_away(silent)
    found.close()
    assert found.pidfd == -1 and found.sock.fileno() == -1
    found.close()


def test_only_old_connections_lose_their_places_and_only_to_others(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_PROOFS", 2)
    ours, old = lobby.admission, lobby.call()
    lobby.now += 10.0
    ours.accept()
    assert not ours.crowded and not is_sent_away(old), "nobody waits for its place"
    new, waits = lobby.call(), lobby.call()
    assert ours.crowded and is_sent_away(old)
    assert not is_sent_away(new) and not is_sent_away(waits)
    while ours.crowded:
        assert ours.proven() == []
    ours.accept()
    assert ours.crowded and ours.refused == 1


def test_a_connection_that_has_proven_itself_keeps_its_place(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MOST_PROOFS", 1)
    caller = lobby.call()
    handshake.connect_side(caller, TOKEN, 1, 0, "control", PATIENCE)
    for thread in threading.enumerate():
        if thread.name == "dpp-proof":
            thread.join(PATIENCE)
    lobby.now += 10.0
    lobby.admission.accept()  # all places are taken, and nobody was handed over yet
    (connection,) = lobby.admission.proven()
    connection.sock.send(b"in")
    assert caller.recv(2) == b"in"
    connection.close()


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EINVAL"])
def test_a_system_without_room_is_a_shortage_and_a_broken_listener_an_error(
    name: str, lobby: Lobby
) -> None:
    """Without descriptors or memory the connection waits, and old ones give up their places."""
    ours, old = lobby.admission, lobby.call()
    lobby.now += 10.0
    lobby.short_of = getattr(errno, name)
    if name == "EINVAL":
        with pytest.raises(OSError, match="Invalid argument"):
            ours.accept()
        return
    ours.accept()
    assert os.strerror(lobby.short_of) in ours.shortage and ours.crowded and is_sent_away(old)
    lobby.short_of = 0
    ours.accept()
    assert not ours.crowded


def test_another_users_process_is_refused_before_it_is_read(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(threading.Thread, "start", None)  # no thread is made for it
    assert lobby.call().recv(16) == b""
    assert lobby.admission.refused == 1


@pytest.mark.parametrize("winner", ["end", "welcome"])
def test_either_the_welcome_or_the_request_to_come_again_is_sent(
    winner: str, lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, send = receive_message, send_message

    def end() -> None:
        proof: Any = threading.current_thread()
        assert proof.name == "dpp-proof"
        proof.end()

    def receive_and_end(*given: Any, **named: Any) -> Any:
        message, fds = receive(*given, **named)
        if set(message) == {"proof"} and winner == "end":
            end()
        return message, fds

    def end_and_send(sock: socket.socket, message: Any, *rest: Any) -> None:
        if "welcome" in message:
            end()
        send(sock, message, *rest)

    monkeypatch.setattr(handshake, "receive_message", receive_and_end)
    monkeypatch.setattr(handshake, "send_message", end_and_send)
    caller = lobby.call()
    if winner == "welcome":
        handshake.connect_side(caller, TOKEN, 1, 0, "control", PATIENCE)
        until_proven(lobby.admission)[0].close()
        return
    with pytest.raises(handshake.SentAway):
        handshake.connect_side(caller, TOKEN, 1, 0, "control", PATIENCE)
    while lobby.admission.refused == 0:
        assert lobby.admission.proven() == []
