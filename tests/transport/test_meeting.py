"""Ranks that meet: proofs, places, tokens and facts, a step at a time."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    SetupError,
    TransportUnavailable,
    VersionMismatch,
)
from megatron.dpp.transport import TransportOptions, admission, handshake, rendezvous
from megatron.dpp.transport.admission import Admission, Connection
from megatron.dpp.transport.job_token import read_token
from megatron.dpp.transport.joining import PeerLink, check_links
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport.kinds import PATIENCE
from tests.transport.test_choice import facts
from tests.transport.test_token import until_empty

TOKEN = b"0123456789abcdef"


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    kind = getattr(request, "param", socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(PATIENCE)
        yield ours, theirs


# Handshake ----------------------------------------------------------------------------------------


def shake(
    ends: tuple[socket.socket, socket.socket], accepts: int, expected: int, token: bytes = TOKEN
) -> list[Any]:
    """Rank 3 connects and expects a rank; returns what each side gets."""
    found: list[Any] = [None, None]

    def accept() -> None:
        try:
            found[1] = handshake.accept_side(ends[1], TOKEN, accepts)
        except (AuthError, ProtocolError) as error:
            found[1] = error

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        handshake.connect_side(ends[0], token, 3, expected, "data 1", PATIENCE)
    except AuthError as error:
        found[0] = error
        ends[0].shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)
    return found


def test_both_sides_prove_themselves(ends: tuple[socket.socket, socket.socket]) -> None:
    assert shake(ends, 7, 7) == [None, (3, "data 1")]


@pytest.mark.parametrize(("accepts", "token"), [(8, TOKEN), (7, TOKEN[::-1])])
def test_another_rank_or_another_job_is_refused(
    accepts: int, token: bytes, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = shake(ends, accepts, 7, token)
    assert "rank 3: what listens as rank 7 does not know this job's token" in str(ours)
    assert isinstance(theirs, ProtocolError)


def test_a_proof_is_for_one_side_one_order_and_one_purpose() -> None:
    texts = [
        handshake._transcript(*given)
        for given in (
            (1, 2, "x", "y", "p"), (2, 1, "x", "y", "p"), (1, 2, "y", "x", "p"),
            (1, 2, "x", "y", "q"), (3, 2, "x", "y", "p"),
        )
    ]  # fmt: skip
    assert len(set(texts)) == 5
    proof = {"proof": handshake._proof(TOKEN, "connector", texts[0])}
    assert handshake._proves(TOKEN, "connector", texts[0], proof)
    assert not handshake._proves(TOKEN, "acceptor", texts[0], proof)
    assert not handshake._proves(TOKEN, "connector", texts[1], proof)
    assert not handshake._proves(TOKEN[::-1], "connector", texts[0], proof)
    for wrong in ({}, {"proof": 7}, {"proof": "\N{EURO SIGN}"}, {"proof": proof["proof"][:-1]}):
        assert not handshake._proves(TOKEN, "connector", texts[0], wrong)


@pytest.mark.parametrize("rank", [None, "3", True, 3.0])
def test_a_hello_names_a_rank_by_its_number(
    rank: Any, ends: tuple[socket.socket, socket.socket]
) -> None:
    handshake.send_message(ends[0], {"rank": rank, "purpose": "p", "nonce": "n"})
    with pytest.raises(ProtocolError, match="a hello without a rank"):
        handshake.accept_side(ends[1], TOKEN, 0)


def test_texts_of_a_hello_are_short() -> None:
    assert handshake._text({"key": "x" * 256}, "key") == "x" * 256
    for message in ({}, {"key": 7}, {"key": "x" * 257}, {"other": "x"}):
        with pytest.raises(ProtocolError, match="a set-up message without key"):
            handshake._text(message, "key")


@pytest.mark.parametrize("answer", [{}, {"welcome": False}, {"welcome": 1}, {"welcome": "yes"}])
def test_only_a_welcome_lets_a_rank_in(
    answer: dict[str, Any], ends: tuple[socket.socket, socket.socket], monkeypatch: Any
) -> None:
    monkeypatch.setattr(handshake, "_proves", lambda *given: True)
    handshake.send_message(ends[1], {"rank": 7, "nonce": "n", "proof": "p"})
    handshake.send_message(ends[1], answer)
    with pytest.raises(AuthError, match="rank 3: rank 7 did not let us in"):
        handshake.connect_side(ends[0], TOKEN, 3, 7, "control", PATIENCE)


@pytest.mark.parametrize("ends", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM], indirect=True)
def test_the_longest_message_passes_and_a_longer_one_is_not_sent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    room = handshake.MAX_HELLO - len('{"a": ""}')
    handshake.send_message(ends[0], {"a": "x" * room})
    assert handshake.receive_message(ends[1]) == ({"a": "x" * room}, [])
    with pytest.raises(ProtocolError, match="4097 bytes; the limit is 4096"):
        handshake.send_message(ends[0], {"a": "x" * (room + 1)})


def test_what_a_peer_said_last_is_found_behind_its_messages(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    for _ in range(7):
        handshake.send_message(ends[1], {}, [descriptor])
    os.close(descriptor)
    ends[1].send(b"\x04\x00\x03\x01why")
    before = len(os.listdir("/proc/self/fd"))
    assert handshake._last_words(ends[0]) == "why"
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors of unread messages stay open"


@pytest.mark.parametrize("ends", [socket.SOCK_STREAM], indirect=True)
def test_a_peer_that_gives_up_is_quoted_while_its_connection_stays_open(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Over tcp, where a note has no end but its length."""
    ends[1].send(b"\x04\x00\x03\x01why" + b"\x02\x00{}")
    with pytest.raises(handshake.PeerEnded, match=r"^why$"):
        handshake.receive_message(ends[0])
    assert handshake.receive_message(ends[0]) == ({}, [])


def test_more_descriptors_than_expected_are_refused_and_closed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    handshake.send_message(ends[1], {}, [descriptor] * 5)
    with pytest.raises(ProtocolError, match="more than 1 descriptors"):
        handshake.receive_message(ends[0], 1)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_time_that_has_run_out_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    handshake.send_message(ends[1], {})
    with pytest.raises(handshake.PeerEnded, match="no answer in time"):
        handshake.receive_message(ends[0], until=time.monotonic())
    handshake._limit(ends[0], None)
    assert ends[0].gettimeout() == PATIENCE
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: 100.0))
    handshake._limit(ends[0], 105.0)
    assert ends[0].gettimeout() == 5.0


def link_of(rank: int, sock: socket.socket) -> PeerLink:
    return PeerLink(rank=rank, peer=1 - rank, sock=sock, incoming=[rank], outgoing=[1 - rank])


def test_enough_descriptors_stay_open_and_too_few_are_closed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    link = link_of(0, ends[0])
    link.require_fds(fds, 2)
    with pytest.raises(ProtocolError, match="rank 0: rank 1 sent 2 descriptors, expected 3"):
        link.require_fds(fds, 3)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("broken", [None, 0, 1, "write"])
def test_both_ends_refuse_a_link_that_loses_what_is_written(
    broken: int | str | None, ends: tuple[socket.socket, socket.socket]
) -> None:
    written: dict[int, int] = {}
    found: dict[int, str] = {}

    def fault_of(link: PeerLink, seed: int) -> str:
        return "zeros" if link.rank == broken or seed != written[link.peer] else ""

    def write(link: PeerLink, seed: int) -> None:
        written[link.rank] = seed
        if (broken, link.rank) == ("write", 1):
            raise SetupError("the card\nsays no")

    def check(rank: int) -> None:
        try:
            check_links([link_of(rank, ends[rank])], write, fault_of, name="GPU", instead="--other")
            found[rank] = "whole"
        except TransportUnavailable as error:
            assert ("the card says no" if broken == "write" else "zeros") in str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == ({0: "whole", 1: "whole"} if broken is None else {})


# Admission ----------------------------------------------------------------------------------------


class Proof:
    """A connection's thread that has ended, or has not."""

    def __init__(self, since: float, alive: bool = True, proven: bool = False) -> None:
        self.since, self.alive, self.proven = since, alive, proven
        self.ended = 0
        self.connection = SimpleNamespace(closed=0, close=self._close)

    def _close(self) -> None:
        self.connection.closed += 1

    def is_alive(self) -> bool:
        return self.alive

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def admits() -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Admission(listener, TOKEN, 0)


def test_the_proven_are_handed_over_once_and_the_others_closed(admits: Any) -> None:
    waits, proven, failed = Proof(0.0), Proof(0.0, False, True), Proof(0.0, False)
    admits._proofs = [waits, proven, failed]
    assert admits.proven() == [proven.connection]
    closed = [proof.connection.closed for proof in (waits, proven, failed)]
    assert (closed, admits.refused, admits._proofs) == ([0, 0, 1], 1, [waits])
    assert admits.proven() == [] and admits.refused == 1


def test_only_old_connections_lose_their_places(admits: Any) -> None:
    now = time.monotonic()
    old, new = Proof(now - 10.0), Proof(now + 10.0)
    admits._proofs = [old, new]
    admits._make_room()
    assert (old.ended, new.ended) == (1, 0)


def test_a_listener_is_crowded_without_places_or_without_descriptors(
    admits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_PROOFS", 2)
    admits._proofs = [Proof(0.0)]
    assert not admits.crowded
    admits.accept()
    assert admits._proofs[0].ended == 0, "nobody waits for its place"
    admits._proofs.append(Proof(time.monotonic() + 10.0))
    assert admits.crowded
    admits.accept()
    assert [proof.ended for proof in admits._proofs] == [1, 0]
    admits._proofs, admits.shortage = [], "no descriptors"
    assert admits.crowded
    admits.accept()
    assert not admits.crowded


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EINVAL"])
def test_a_system_without_room_is_a_shortage_and_a_broken_listener_an_error(
    name: str, admits: Any
) -> None:
    """Without descriptors or memory the connection waits, and old ones give up their places."""
    number = getattr(errno, name)

    def accept() -> Any:
        raise OSError(number, os.strerror(number))

    admits._listener = SimpleNamespace(accept=accept)
    old = Proof(time.monotonic() - 10.0)
    admits._proofs = [old]
    if name == "EINVAL":
        with pytest.raises(OSError, match="Invalid argument"):
            admits.accept()
        return
    admits.accept()
    assert os.strerror(number) in admits.shortage and admits.crowded and old.ended == 1


def test_places_are_for_64_connections(admits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        admission, "_Proof", lambda *_: SimpleNamespace(start=lambda: None, since=1e30)
    )
    monkeypatch.setattr(admission, "identify", lambda *_: None)
    waiting = [SimpleNamespace() for _ in range(70)]
    admits._listener = SimpleNamespace(accept=lambda: (waiting.pop(), None))
    admits.accept()
    assert len(admits._proofs) == 64 and len(waiting) == 6
    admits._proofs.clear()


def test_a_connection_closes_its_descriptors_once() -> None:
    one, other = socket.socketpair()
    with other:
        connection = Connection(1, "control", one, os.open("/dev/null", os.O_RDONLY))
        connection.close()
        assert connection.pidfd == -1 and one.fileno() == -1
        connection.close()
        admission.identify(Connection(1, "", other), 0)


# Rendezvous ---------------------------------------------------------------------------------------


def met(store: Any, rank: int, **options: Any) -> Rendezvous:
    return Rendezvous(store, rank, TransportOptions(setup_timeout=PATIENCE, **options))


def test_the_token_of_a_node_goes_when_all_ranks_have_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("DPP_TOKEN_FILE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store, left, tokens = HashStore(), [], set()
    for rank in range(3):
        with met(store, rank) as one:
            tokens.add(one._token)
        left.append(len(list(tmp_path.iterdir())))
    assert left[:2] == [1, 1] and len(tokens) == 1
    until_empty(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with met(store, 0, name="other") as one, met(store, 1, name="other") as two:
        assert one._token == two._token == store.get("dpp/other/1/token")
        assert one.unix_address != two.unix_address and one._token not in tokens
    with met(store, 0, name="other") as again:
        assert again._prefix == "dpp/other/2" and again._token != one._token
    assert not list(tmp_path.iterdir())


def test_a_named_token_file_comes_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode, size in (("own", 0o600, 16), ("env", 0o600, 17), ("read", 0o640, 32)):
        (tmp_path / name).write_text(name[0] * size + "\n")
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("DPP_TOKEN_FILE", str(tmp_path / "env"))
    with met(HashStore(), 0, token_file=str(tmp_path / "own")) as one:
        assert one._token == b"o" * 16
    with met(HashStore(), 0) as one:
        assert one._token == b"e" * 17
    with pytest.raises(ConfigError, match="has mode 640; chmod 600 it"):
        read_token(tmp_path / "read")
    (tmp_path / "own").write_text("x" * 15 + "\n")
    with pytest.raises(ConfigError, match="holds 15 bytes; 16 are the least"):
        read_token(tmp_path / "own")


def test_the_lower_rank_of_a_pair_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[int, str, bool]] = []
    admitted: set[tuple[int, str]] = set()
    watched: list[Any] = []

    def reach(peer: Any, purpose: str, *, over_tcp: bool) -> Any:
        reached.append((peer.rank, purpose, over_tcp))
        family = socket.AF_INET if over_tcp else socket.AF_UNIX
        return SimpleNamespace(sock=SimpleNamespace(family=family, name=(peer.rank, purpose)))

    def unanswered(sock: Any, seconds: float) -> None:
        watched.append((sock.name, seconds))

    with met(HashStore(), 4, peer_timeout=9.0) as one:
        monkeypatch.setattr(one, "_reach", reach)
        monkeypatch.setattr(one, "_admit", lambda missing, made: admitted.update(missing))
        monkeypatch.setattr(rendezvous, "_end_when_unanswered", unanswered)
        wanted = [(facts(3), "control", False), (facts(5), "control", False)]
        far = [(6, purpose, True) for purpose in ("control", "data 0", "data 1")]
        made = one.connect([*wanted, *((facts(rank), use, tcp) for rank, use, tcp in far)])
    assert sorted(reached) == [(5, "control", False), *far]
    assert admitted == {(3, "control")}
    assert set(made) == {(rank, purpose) for rank, purpose, _ in reached}
    assert watched == [((6, "control"), 9.0)], "payloads may wait for long"


def test_what_is_not_there_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with met(HashStore(), 4, listen_ports=None) as one:
        counts = [SimpleNamespace(refused=2, shortage=""), SimpleNamespace(refused=1, shortage="x")]
        missing = {(7, "control"), (2, "data 0"), (7, "data 0")}
        one._check_patience(missing, counts)  # type: ignore[arg-type]
        one._deadline = time.monotonic()
        with pytest.raises(SetupError) as caught:
            one._check_patience(missing, counts)  # type: ignore[arg-type]
        said = str(caught.value)
        assert "rank 4: ranks [2, 7] have not connected after 30 s; 3 connections could" in said
        assert "; accepting failed: x" in said
        with pytest.raises(SetupError, match=r"rank 4: rank 9 has not opened its .* after 30 s"):
            one._get("facts/9", "rank 9")
        one._deadline = time.monotonic() + 700.0
        asked: list[timedelta] = []
        store = SimpleNamespace(wait=lambda keys, limit: asked.append(limit), get=lambda key: b"v")
        monkeypatch.setattr(one, "_store", store)
        assert one._get("key", "") == "v"
        assert 600.0 < asked[0].total_seconds() <= 700.0


def test_a_peer_of_other_settings_is_named() -> None:
    settings = {"checksum": False, "workload": 4}
    own = facts(0, settings=settings)
    peer = dataclasses.asdict(facts(1, settings=dict(settings)))
    rendezvous._compare(own, peer)
    with pytest.raises(VersionMismatch, match="speaks transport version 1, rank 1 on node1 spe"):
        rendezvous._compare(own, {**peer, "abi": 2})
    text = "transport option workload is 4 on rank 0 and 8 on rank 1 on node1"
    with pytest.raises(VersionMismatch, match=text):
        rendezvous._compare(own, {**peer, "settings": {**settings, "workload": 8}})


@pytest.mark.parametrize(
    ("seconds", "idle", "probes", "most"),
    [(30.0, 3, 11, 36.0), (8.0, 1, 9, 10.0), (1.0, 1, 2, 3.0), (0.3, 1, 2, 2.3)],
)
def test_a_silent_host_is_not_lost_before_its_time(
    seconds: float, idle: int, probes: int, most: float
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        rendezvous._watch_tcp(sock, seconds)
        rendezvous._end_when_unanswered(sock, seconds)
        found = [
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        ]
        assert [bool(found[0]), *found[1:]] == [True, idle, idle, probes, most * 1000]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        rendezvous._watch_tcp(one, seconds)


def test_ranks_of_a_host_begin_at_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def create(address: tuple[str, int], **_: Any) -> Any:
        tried.append(address[1])
        raise OSError(98, "Address already in use")

    with met(HashStore(), 5, listen_ports=(7000, 7002)) as one:
        monkeypatch.setattr(socket, "create_server", create)
        with pytest.raises(SetupError, match="all ports from 7000 to 7002 of h are in use"):
            one._listen_on("h")
    assert tried == [7002, 7000, 7001]


def test_a_proof_holds_for_both_nonces_both_ranks_and_one_purpose() -> None:
    first = (1, 2, "a", "b", "control")
    others = [(3, 2, "a", "b", "control"), (1, 3, "a", "b", "control"), (1, 2, "c", "b", "control")]
    others += [(1, 2, "a", "c", "control"), (1, 2, "a", "b", "data 0"), (2, 1, "a", "b", "control")]
    assert len({handshake._transcript(*each) for each in (first, *others)}) == 7
