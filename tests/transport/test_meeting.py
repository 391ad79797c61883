"""Ranks that meet: proofs, places, tokens and facts, a step at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
    VersionMismatch,
)
from megatron.dpp.transport import TransportOptions, handshake, rendezvous
from megatron.dpp.transport.admission import Connection
from megatron.dpp.transport.job_token import read_token
from megatron.dpp.transport.joining import Facts, PeerLink, link_faults
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport.kinds import PATIENCE, proof_of
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


def prove(
    ends: tuple[socket.socket, socket.socket], answer: Callable[[str], Any]
) -> tuple[dict[str, Any], Any]:
    """Rank 1 connects to rank 2 with ``answer(nonce)`` as its proof; returns both sides' words."""
    found: list[Any] = []

    def accept() -> None:
        try:
            found.append(handshake.accept_side(ends[1], TOKEN, 2))
        except (AuthError, ProtocolError) as error:
            found.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    handshake.send_message(ends[0], {"rank": 1, "purpose": "p", "nonce": "n"})
    said, _ = handshake.receive_message(ends[0])
    handshake.send_message(ends[0], {"proof": answer(said["nonce"])})
    thread.join(PATIENCE)
    return said, found[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"side": "acceptor"}, {"connector": 3}, {"acceptor": 1}, {"connector": 2, "acceptor": 1},
        {"first": "m"}, {"second": "m"}, {"purpose": "q"}, {"token": TOKEN[::-1]}, 7, "",
        "\N{EURO SIGN}", None, {},
    ],
)  # fmt: skip
def test_a_proof_is_for_one_side_both_ranks_both_nonces_and_one_purpose(
    wrong: Any, ends: tuple[socket.socket, socket.socket]
) -> None:
    right = {"connector": 1, "acceptor": 2, "first": "n", "purpose": "p", "token": TOKEN}

    def answer(nonce: str) -> Any:
        if not isinstance(wrong, dict):
            return wrong
        return proof_of(**{"side": "connector", **right, "second": nonce, **wrong})

    said, verdict = prove(ends, answer)
    assert said["proof"] == proof_of(side="acceptor", second=said["nonce"], **right)
    if wrong == {}:
        assert verdict == (1, "p")
    else:
        assert type(verdict) is AuthError and "claims to be rank 1 has a wrong pro" in str(verdict)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"rank": rank}, "a hello without a rank") for rank in (None, "3", True, 3.0)]
    + [({"purpose": value}, "a set-up message without purpose") for value in (None, 7, "x" * 257)],
)
def test_a_hello_names_a_rank_by_its_number_and_has_short_texts(
    wrong: dict[str, Any], says: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    handshake.send_message(ends[0], {"rank": 3, "purpose": "x" * 256, "nonce": "n", **wrong})
    with pytest.raises(ProtocolError, match=says):
        handshake.accept_side(ends[1], TOKEN, 0)


@pytest.mark.parametrize("answer", [{}, {"welcome": False}, {"welcome": 1}, {"welcome": "yes"}])
def test_only_a_welcome_lets_a_rank_in(
    answer: dict[str, Any], ends: tuple[socket.socket, socket.socket], monkeypatch: Any
) -> None:
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_hex=lambda _: "n"))
    proof = proof_of("acceptor", 3, 7, "n", "n", "control", TOKEN)
    handshake.send_message(ends[1], {"rank": 7, "nonce": "n", "proof": proof})
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
    text = "rank 0: the set-up of the links with rank 1 ended: why$"
    with pytest.raises(SetupError, match=text), handshake.joining(0, 1, ends[0]):
        raise ConnectionError
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
    handshake.receive_message(ends[0])
    assert ends[0].gettimeout() == PATIENCE
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: 100.0))
    handshake.send_message(ends[1], {})
    handshake.receive_message(ends[0], until=105.0)
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
def test_both_ends_know_of_a_link_that_loses_what_is_written(
    broken: int | str | None, ends: tuple[socket.socket, socket.socket]
) -> None:
    written: dict[int, int] = {}
    found: dict[int, dict[int, str]] = {}

    def fault_of(link: PeerLink, seed: int) -> str:
        return "zeros" if link.rank == broken or seed != written[link.peer] else ""

    def write(link: PeerLink, seed: int) -> None:
        written[link.rank] = seed
        if (broken, link.rank) == ("write", 1):
            raise SetupError("the card\nsays no")

    def check(rank: int) -> None:
        found[rank] = link_faults([link_of(rank, ends[rank])], write, fault_of)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    fault = "the card says no" if broken == "write" else "zeros"
    assert found == {rank: {} if broken is None else {1 - rank: fault} for rank in range(2)}


# Rendezvous ---------------------------------------------------------------------------------------


def met(store: Any, rank: int, tcp_host: str | None = None, **options: Any) -> Rendezvous:
    given = {"setup_timeout": PATIENCE, **options}
    return Rendezvous(store, rank, TransportOptions(**given), tcp_host)


def test_behind_a_connection_that_nobody_misses_others_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a peer connected twice and all have proven themselves at one look."""
    ends = [(number, *socket.socketpair()) for number in (1, 1, 2)]
    proven = [Connection(0, f"data {number}", ours) for number, ours, _ in ends]

    class Admission:
        refused, shortage, crowded = 0, "", False

        def __init__(self, *_: Any) -> None:
            self.close = self.accept = lambda: None

        def proven(self) -> list[Connection]:
            found, proven[:] = list(proven), []
            return found

    monkeypatch.setattr(rendezvous, "Admission", Admission)
    first, again, other = proven
    with met(HashStore(), 1) as one:
        made = one.connect([(facts(0), f"data {number}", False) for number in (1, 2)])
    assert made == {(0, "data 1"): first, (0, "data 2"): other}
    assert again.sock.fileno() == -1 != first.sock.fileno()
    for _, ours, theirs in ends:
        ours.close()
        theirs.close()


def job_of(one: Rendezvous) -> str:
    """Names the job's token in the address of a rank."""
    return one.unix_address.split("-")[1]


def named_by(token: bytes) -> str:
    return hashlib.sha256(b"address" + token).hexdigest()[:16]


def test_the_token_of_a_node_goes_when_all_ranks_have_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("DPP_TOKEN_FILE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store, left, jobs = HashStore(), [], set()
    for rank in range(3):
        with met(store, rank) as one:
            jobs.add(job_of(one))
        left.append(len(list(tmp_path.iterdir())))
    assert left[:2] == [1, 1] and len(jobs) == 1
    until_empty(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with met(store, 0, name="other") as one, met(store, 1, name="other") as two:
        assert job_of(one) == job_of(two) == named_by(store.get("dpp/other/1/token"))
        assert one.unix_address != two.unix_address and job_of(one) not in jobs
    with met(store, 0, name="other") as again:
        assert job_of(again) == named_by(store.get("dpp/other/2/token")) != job_of(one)
    assert not list(tmp_path.iterdir())


def test_a_named_token_file_comes_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode, size in (("own", 0o600, 16), ("env", 0o600, 17), ("read", 0o640, 32)):
        (tmp_path / name).write_text(name[0] * size + "\n")
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("DPP_TOKEN_FILE", str(tmp_path / "env"))
    with met(HashStore(), 0, token_file=str(tmp_path / "own")) as one:
        assert job_of(one) == named_by(b"o" * 16)
    with met(HashStore(), 0) as one:
        assert job_of(one) == named_by(b"e" * 17)
    with pytest.raises(ConfigError, match="has mode 640; chmod 600 it"):
        read_token(tmp_path / "read")
    (tmp_path / "own").write_text("x" * 15 + "\n")
    with pytest.raises(ConfigError, match="holds 15 bytes; 16 are the least"):
        read_token(tmp_path / "own")


@pytest.mark.parametrize(
    ("seconds", "idle", "probes", "most"),
    [(30.0, 3, 11, 36.0), (8.0, 1, 9, 10.0), (1.0, 1, 2, 3.0), (0.3, 1, 2, 2.3)],
)
def test_the_lower_rank_connects_and_a_silent_host_is_not_lost_before_its_time(
    seconds: float, idle: int, probes: int, most: float
) -> None:
    store, made = HashStore(), {}
    purposes = ["control", "data 0"]

    def meet(rank: int) -> None:
        with met(store, rank, "127.0.0.1", peer_timeout=seconds) as one:
            own = facts(rank, tcp_address=one.tcp_address)
            (peer,) = one.exchange(own, [1 - rank]).values()
            made[rank] = one.tcp_address, one.connect([(peer, use, True) for use in purposes])

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    address, found = made[1]
    assert set(found) == {(0, use) for use in purposes} and len(made[0][1]) == 2
    assert {connection.sock.getsockname() for connection in found.values()} == {address}
    for connections in (found, made[0][1]):
        for (_, purpose), connection in connections.items():
            with connection.sock as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                says = [
                    sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                    for name in ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
                ]
            waits = most * 1000 if purpose == "control" else 0  # payloads may wait for long
            assert [bool(says[0]), *says[1:]] == [True, idle, idle, probes, waits]


def test_what_is_not_there_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([("", 1), ("x", 2)])

    def admission(*_: Any) -> Any:
        shortage, refused = next(counts)
        return SimpleNamespace(
            shortage=shortage, refused=refused, close=lambda: None, proven=list, crowded=False
        )

    monkeypatch.setattr(rendezvous, "Admission", admission)
    with met(HashStore(), 8, "127.0.0.1", setup_timeout=0.01) as one:
        with pytest.raises(SetupError, match=r"rank 8: rank 9 has not opened its .* after 0.01 s"):
            one.exchange(facts(8), [9])
        with pytest.raises(SetupError) as caught:
            one.connect([(facts(7), "control", False), (facts(2), "data 0", True)])
    said = str(caught.value)
    assert "rank 8: ranks [2, 7] have not connected after 0.01 s; 3 connections could" in said
    assert "; accepting failed: x" in said


def test_facts_are_waited_for_until_the_deadline() -> None:
    asked: list[timedelta] = []

    class Waits(HashStore):
        def wait(self, keys: list[str], limit: timedelta) -> None:  # type: ignore[override]
            asked.append(limit)

    store = Waits()
    with met(store, 1) as one, met(store, 0, setup_timeout=700.0) as other:
        one.exchange(facts(1), [])
        assert other.exchange(facts(0), [1]) == {1: facts(1)}
    assert 600.0 < asked[-1].total_seconds() <= 700.0


def exchanged(own: Facts, peers: Facts) -> Facts:
    """The facts that rank 0 takes from the place of rank 1 in the store."""
    store = HashStore()
    with met(store, 1) as one, met(store, 0) as other:
        one.exchange(peers, [])
        return other.exchange(own, [1])[1]


def test_a_peer_of_other_settings_is_named() -> None:
    settings = {"checksum": False, "workload": 4}
    own, peer = facts(0, settings=settings), facts(1, settings=dict(settings))
    assert exchanged(own, peer) == peer
    with pytest.raises(VersionMismatch, match="speaks transport version 1, rank 1 on node1 spe"):
        exchanged(own, dataclasses.replace(peer, abi=2))
    text = "transport option workload is 4 on rank 0 and 8 on rank 1 on node1"
    with pytest.raises(VersionMismatch, match=text):
        exchanged(own, dataclasses.replace(peer, settings={**settings, "workload": 8}))


@pytest.mark.parametrize(
    ("number", "ports", "tried", "says"),
    [
        (98, (7000, 7002), [7002, 7000, 7001], "all ports from 7000 to 7002 of h are in use"),
        (13, (7000, 7002), [7002], "rank 5: cannot listen on h:7002 .*Permission denied"),
        (98, None, [0], "rank 5: cannot listen on h:0 .*Address already in use"),
    ],
)
def test_ranks_of_a_host_begin_at_different_ports(
    number: int, ports: Any, tried: list[int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def create(address: tuple[str, int], **_: Any) -> Any:
        asked.append(address[1])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", create)
    with pytest.raises(SetupError, match=says):
        met(HashStore(), 5, "h", listen_ports=ports)
    assert asked == tried
