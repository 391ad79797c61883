"""Who is let in: proofs, places of a listener, strangers, and true peers that are turned down."""

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

from megatron.dpp.errors import AuthError, ProtocolError, SetupError, TransportError
from megatron.dpp.transport import handshake, meet
from megatron.dpp.transport.handshake import Admission, Connection
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.messages import PeerEnded, receive_message, send_message
from tests.transport import stranger
from tests.transport.kinds import PATIENCE, proof_of
from tests.transport.meeting import (
    TOKEN,
    Ends,
    both,
    census,
    connected,
    ends,
    facts,
    met,
    none_failed,
    open_both,
    token_file,
    until_no_more_than,
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


# Strangers ----------------------------------------------------------------------------------------


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
