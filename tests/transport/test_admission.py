"""Places of a listener: callers that prove themselves, that say nothing, and that find no room."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.dpp.transport import admission, handshake
from megatron.dpp.transport.admission import Admission, Connection
from tests.transport.kinds import PATIENCE

TOKEN = b"0123456789abcdef"


class Lobby:
    """An admission whose clock is the test's, and its callers."""

    def __init__(self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.short_of, self._stack = 100.0, 0, stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.admission = Admission(cast(Any, self), TOKEN, 0)
        stack.callback(self.admission.close)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(admission, "time", clock)

    def setblocking(self, flag: bool) -> None:
        self._listener.setblocking(flag)

    def accept(self) -> Any:
        if self.short_of:
            raise OSError(self.short_of, os.strerror(self.short_of))
        return self._listener.accept()

    def call(self) -> socket.socket:
        """A caller that has said nothing yet; it was accepted if there was a place."""
        caller = self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        caller.settimeout(PATIENCE)
        self.admission.accept()
        return caller


def is_sent_away(caller: socket.socket) -> bool:
    """True for a caller that has heard that it shall come again; others have heard nothing."""
    try:
        return handshake.receive_message(caller, until=time.monotonic() + 0.02) == (AGAIN, [])
    except handshake.PeerEnded:
        return False


AGAIN = {"again": True}


@pytest.fixture
def lobby(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lobby]:
    with contextlib.ExitStack() as stack:
        yield Lobby(stack, monkeypatch)


def test_the_proven_are_handed_over_once_and_the_others_closed(lobby: Lobby) -> None:
    ours = lobby.admission
    silent, proven, other = (lobby.call() for _ in range(3))
    other.sendall(b"\x02\x00[]")
    handshake.connect_side(proven, TOKEN, 7, 0, "data 1", PATIENCE)
    found = until_proven(ours, refused=1)
    assert other.recv(1) == b""
    assert [(one.peer, one.purpose) for one in found] == [(7, "data 1")]
    assert ours.proven() == [] and ours.refused == 1 and not is_sent_away(silent)
    found[0].close()


def until_proven(ours: Admission, refused: int) -> list[Connection]:
    deadline, found = time.monotonic() + PATIENCE, []
    while not found or ours.refused < refused:
        assert time.monotonic() < deadline
        found += ours.proven()
        time.sleep(0.001)
    return found


def test_only_old_connections_lose_their_places_and_only_to_others(
    lobby: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_PROOFS", 2)
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


def test_a_connection_closes_its_descriptors_once() -> None:
    one, other = socket.socketpair()
    with other:
        connection = Connection(1, "control", one, os.open("/dev/null", os.O_RDONLY))
        connection.close()
        assert connection.pidfd == -1 and one.fileno() == -1
        connection.close()
        admission.identify(Connection(1, "", other), 0)
