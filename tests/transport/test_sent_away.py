"""A true peer that a listener turns down connects again until its deadline, and no longer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import AuthError, SetupError
from megatron.dpp.transport import TransportOptions, admission, handshake, rendezvous
from megatron.dpp.transport.admission import Connection
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport.kinds import PATIENCE
from tests.transport.test_choice import facts
from tests.transport.test_strangers import TOKEN, admitting, open_both

Way = Callable[[socket.socket], None]


class Reaching:
    """A rank that reaches for rank 5, which is the test; it waits before it says anything."""

    def __init__(
        self, kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path, patience: float = PATIENCE
    ) -> None:
        self.found: Any = None
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
        self._over_tcp = kind == "tcp"
        monkeypatch.setattr(rendezvous, "identify", self._wait)
        secret = folder / "token"
        secret.touch(0o600)
        secret.write_bytes(TOKEN)
        options = TransportOptions(setup_timeout=patience, token_file=str(secret))
        self.rank = Rendezvous(HashStore(), 4, options)
        self._thread = threading.Thread(target=self._reach)
        self._thread.start()

    def _wait(self, *_: Any) -> None:
        assert self.speak.acquire(timeout=PATIENCE)

    def _reach(self) -> None:
        try:
            (self.found,) = self.rank.connect([(self.peer, "control", self._over_tcp)]).values()
        except Exception as error:
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
        self.rank.close()


@pytest.fixture(params=["shm", "tcp"])
def reaching(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Reaching]:
    made = Reaching(request.param, monkeypatch, tmp_path)
    yield made
    made.close()


def hang_up(sock: socket.socket) -> None:
    """As an acceptor without a thread does, or one whose time for a hello has passed."""


def reset(sock: socket.socket) -> None:
    """As a TCP connection that is closed before all was read."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


WAYS = {"away": handshake.send_away, "hang up": hang_up, "reset": reset}


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
            handshake.receive_message(sock)
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
        with pytest.raises((AuthError, handshake.PeerEnded)):
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
    assert type(error) is SetupError
    assert "rank 4: cannot reach rank 5 on" in str(error)
    reaching.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_an_acceptor_without_a_thread_asks_its_peers_to_come_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [3]

    def start_later(self: threading.Thread) -> None:
        if self.name == "dpp-proof" and left[0] > 0:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    found = open_both(kind, monkeypatch, lambda _: None)
    assert not [end for end in found.values() if isinstance(end, Exception)]
    assert left == [0]


# A connection that is sent away while it is let in ------------------------------------------------


def knock(name: str) -> tuple[socket.socket, threading.Thread, list[Any]]:
    """A true peer at an abstract socket, in a thread of its own."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(name)
    found: list[Any] = []

    def prove() -> None:
        try:
            found.append(handshake.connect_side(sock, TOKEN, 1, 0, "control", PATIENCE))
        except AuthError as error:
            found.append(error)

    thread = threading.Thread(target=prove)
    thread.start()
    return sock, thread, found


def end_of_proofs() -> None:
    for thread in threading.enumerate():
        if thread.name == "dpp-proof":
            thread.join(PATIENCE)


def test_a_connection_that_has_proven_itself_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(admission, "MOST_PROOFS", 1)
    with admitting() as (ours, name):
        sock, thread, found = knock(name)
        with sock:
            ours.accept()
            thread.join(PATIENCE)
            end_of_proofs()
            now[0] += 10.0
            ours.accept()  # all places are taken, and nobody was handed over yet
            (connection,) = ours.proven()
            assert found == [None] and (connection.peer, connection.purpose) == (1, "control")
            with connection.sock:
                connection.sock.send(b"in")
                assert sock.recv(2) == b"in"


@pytest.mark.parametrize("winner", ["end", "welcome"])
def test_either_the_welcome_or_the_request_to_come_again_is_sent(
    winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, send = handshake.receive_message, handshake.send_message

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
    with admitting() as (ours, name):
        sock, thread, found = knock(name)
        with sock:
            ours.accept()
            thread.join(PATIENCE)
            end_of_proofs()
            let_in = ours.proven()
            assert len(let_in) == (winner == "welcome")
            for connection in let_in:
                connection.close()
    assert isinstance(found[0], handshake.SentAway) == (winner == "end")
