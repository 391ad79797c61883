"""Ranks that meet over a store: their token, their facts, their addresses and their connections."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Callable
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
    TransportError,
    VersionMismatch,
)
from megatron.dpp.transport import meet
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.meet import read_token
from megatron.dpp.transport.native import load_native
from tests.transport.kinds import PATIENCE
from tests.transport.meeting import TOKEN, accept, both, errors_of, facts, met, token_file

TOKEN_KEY = "dpp/main/1/token"


def named_by(token: bytes) -> str:
    return hashlib.sha256(b"name" + token).hexdigest()[:16]


# The token ----------------------------------------------------------------------------------------


def test_the_store_has_the_token_of_each_opening() -> None:
    store, names = HashStore(), []
    for opening in (1, 2):
        with met(store, 0) as one, met(store, 1) as other:
            names.append(named_by(store.get(f"dpp/main/{opening}/token")))
            assert one.token_name == other.token_name == names[-1]
            assert one.unix_address != other.unix_address
    assert names[0] != names[1]


def test_a_token_file_keeps_the_token_out_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named file comes before that of the environment; two jobs of one listen side by side."""
    own, other = (str(token_file(tmp_path, name.encode() * 16, name)) for name in "oe")
    monkeypatch.setenv("DPP_TOKEN_FILE", other)
    store = HashStore()
    with met(store, 0, token_file=own) as one, met(HashStore(), 0, token_file=own) as twin:
        assert one.token_name == twin.token_name == named_by(b"o" * 16)
        assert one.unix_address != twin.unix_address
    with met(store, 0) as one:
        assert one.token_name == named_by(b"e" * 16)
    assert not store.check([TOKEN_KEY])


def named_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def readable(path: Path) -> None:
    token_file(path.parent, TOKEN * 2, path.name).chmod(0o640)


def huge(path: Path) -> None:
    os.truncate(token_file(path.parent, b"", path.name), 1 << 40)


def short(path: Path) -> None:
    token_file(path.parent, b"x" * 15 + b"\n", path.name)


def nothing(path: Path) -> None:
    pass


WRONG_FILES: tuple[tuple[Callable[[Path], Any], str], ...] = (
    (named_pipe, "is not a regular file"), (Path.mkdir, "not a regular file|Is a directory"),
    (readable, "has mode 640; chmod 600 it"), (huge, "has more than 65536 bytes"),
    (short, "holds 15 bytes; 16 are the least"), (nothing, "No such file"),
)  # fmt: skip


@pytest.mark.parametrize(("make", "says"), WRONG_FILES)
def test_a_token_file_is_private_regular_and_long_enough(
    make: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    make(tmp_path / "token")
    with pytest.raises(ConfigError, match=says):
        read_token(tmp_path / "token")


def test_a_token_file_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = token_file(tmp_path, TOKEN + b"\n")
    (tmp_path / "link").symlink_to(secret)
    assert read_token(secret) == read_token(tmp_path / "link") == TOKEN
    with pytest.raises(ConfigError, match=r"token file a\x00b: .*embedded null"):
        read_token(Path("a\0b"))
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}; it must be ours"):
        read_token(secret)


@pytest.mark.parametrize("key", ["opened/0", "1/token/claimed"])
def test_broken_entries_of_the_store_are_typed_errors(key: str) -> None:
    store = HashStore()
    store.set(f"dpp/main/{key}", b"\xff\xfe")
    with pytest.raises(TransportError, match="rank 0"):
        met(store, 0, setup_timeout=0.5)


# A wrong secret, and a rank that cannot open ------------------------------------------------------


@pytest.mark.parametrize("wrong", ["another", "the store's"])
def test_a_wrong_secret_is_named_on_both_nodes_at_once(wrong: str, tmp_path: Path) -> None:
    right = str(token_file(tmp_path))
    given = {"token_file": right}
    other = (
        {"token_file": str(token_file(tmp_path, b"x" * 20, "other"))} if wrong == "another" else {}
    )
    found = errors_of("shm", 20.0, options=(given, other))
    source = other.get("token_file", "torchrun's store")
    for rank, where in ((0, right), (1, source)):
        text = (
            f"rank {rank} on .* has another secret of the job .from {where}. than rank {1 - rank}"
        )
        with pytest.raises(AuthError, match=f"{text} on .*: give every node the same file"):
            raise found[rank]


def test_a_rank_that_cannot_open_says_why_on_all_others(tmp_path: Path) -> None:
    """Without waiting for the deadline of the set-up, which is far."""
    missing = {"token_file": str(tmp_path / "none")}
    found = errors_of("shm", 100.0, options=({"token_file": str(token_file(tmp_path))}, missing))
    assert type(found[1]) is ConfigError and "none: No such file" in str(found[1])
    assert type(found[0]) is SetupError
    assert f"could not open its transport: {found[1]}" in str(found[0])
    assert "rank 0: rank 1 on " in str(found[0])


# Facts --------------------------------------------------------------------------------------------


def exchanged(own: Facts, peers: Facts | str) -> Facts:
    """The facts that rank 0 takes from the place of rank 1 in the store."""
    store = HashStore()
    text = peers if isinstance(peers, str) else json.dumps(dataclasses.asdict(peers))
    with met(store, 0) as other:
        store.set("dpp/main/1/facts/1", text)
        return other.exchange(own, [1])[1]


GOOD = facts(
    1, abi=load_native().abi_version, gpu_access={"x": True},
    settings={"checksum": False, "workload": 1 << 20, "tcp_connections": 4},
)  # fmt: skip
OWN = dataclasses.replace(GOOD, rank=0)
FIELDS = dataclasses.asdict(GOOD)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({}, None, ""),
        ({"rank": 2}, ProtocolError, "they are of rank 2"),
        ({"abi": 99}, VersionMismatch, "rank 0 speaks transport version .*, rank 1 on node1 spe"),
        ({"settings": {**GOOD.settings, "workload": 8}}, VersionMismatch,
         "transport option workload is 1048576 on rank 0 and 8 on rank 1 on node1"),
        ({"token": "other"}, AuthError, "rank 0 on node1 has another secret of the job"),
        ({"tcp_address": None}, ProtocolError, "tcp_address is 'None'"),
        ({"found": {"rdma": 5}}, ProtocolError, "not a mapping"),
        ({"found": {"rdma": {}}}, ProtocolError, "'places'"),
        ({"found": {"rdma": {"places": [{}]}}}, ProtocolError, "missing 4 required"),
        ({"found": {"rdma": {"places": [5]}}}, ProtocolError, "must be a mapping"),
        ({"found": {"rdma": {"places": 5}}}, ProtocolError, "not iterable"),
        ("[" * 100_000, ProtocolError, ""), ("[]", ProtocolError, ""), ("{", ProtocolError, ""),
        (json.dumps({"abi": GOOD.abi}), ProtocolError, ""),
    ],
)  # fmt: skip
def test_facts_are_checked_before_they_are_believed(
    change: Any, error: type[TransportError] | None, text: str
) -> None:
    peers = change if isinstance(change, str) else json.dumps({**FIELDS, **change})
    if error is None:
        assert exchanged(OWN, peers) == GOOD
        return
    broken = "rank 0: the store holds broken facts of rank 1" if error is ProtocolError else ""
    with pytest.raises(error, match=f"{broken}.*{text}"):
        exchanged(OWN, peers)


WRONG = [
    (field, value)
    for field in sorted(FIELDS)
    for value in (7, "\ud800", None, [1], {"a": "\ud800"})
    if (field, value) not in (("uid", 7), ("pid", 7), ("tcp_address", [1]))
]


def test_facts_of_wrong_types_are_named() -> None:
    for field, value in WRONG:
        with pytest.raises(TransportError, match="rank 0") as caught:
            exchanged(OWN, json.dumps({**FIELDS, field: value}))
        assert "rank 1" in str(caught.value) or field in ("rank", "hostname", "abi"), caught.value


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


def test_what_is_not_there_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = SimpleNamespace(shortage="x", refused=3, close=lambda: None)
    monkeypatch.setattr(meet, "Admission", lambda *_: admission)
    with met(HashStore(), 8, "127.0.0.1", setup_timeout=0.01) as one:
        with pytest.raises(SetupError, match=r"rank 8: rank 9 has not opened its .* after 0.01 s"):
            one.exchange(facts(8), [9])
        with pytest.raises(SetupError) as caught:
            one.connect([(facts(7), "control", False), (facts(2), "data 0", True)])
    said = str(caught.value)
    assert "rank 8: ranks [2, 7] have not connected after 0.01 s; 3 connections could" in said
    assert "; accepting failed: x" in said


def test_a_store_that_is_gone_is_a_typed_error() -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe: the store is gone")

    found = errors_of("shm", 0.5, store=Gone())
    text = r"rank 0: the set-up of the links ended: .*store is gone|rank 0: the first rank has not"
    with pytest.raises(SetupError, match=text):
        raise found[0]


def test_a_stopped_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the store; without the name a rank blames its peer alone."""
    found = {os.getppid(): ["process 7 (pt_elastic)"]}
    monkeypatch.setattr(meet, "stopped", found.__getitem__)
    text = r"rank 1 has not opened .*; process 7 \(pt_elastic\) is stopped on"
    with met(HashStore(), 0, setup_timeout=0.2) as one, pytest.raises(SetupError, match=text):
        one.exchange(facts(0), [1])


# Connections --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "idle", "probes", "most"),
    [(30.0, 3, 11, 36.0), (8.0, 1, 9, 10.0), (1.0, 1, 2, 3.0), (0.3, 1, 2, 2.3)],
)
def test_the_lower_rank_connects_and_a_silent_host_is_not_lost_before_its_time(
    seconds: float, idle: int, probes: int, most: float
) -> None:
    store, made, purposes = HashStore(), {}, ["control", "data 0"]

    def act(rank: int) -> None:
        with met(store, rank, "127.0.0.1", peer_timeout=seconds) as one:
            own = facts(rank, tcp_address=one.tcp_address)
            (peer,) = one.exchange(own, [1 - rank]).values()
            made[rank] = one.tcp_address, one.connect([(peer, use, True) for use in purposes])

    assert both(act) == {0: None, 1: None}
    address, found = tuple(made[1][0]), made[1][1]
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


@pytest.mark.parametrize(
    ("number", "ports", "tried", "says"),
    [
        (98, (7000, 7002), [7000, 7001, 7002], "all ports from 7000 to 7002 of h are in use"),
        (13, (7000, 7002), [7000], "rank 5: cannot listen on h:7000 .*Permission denied"),
        (98, None, [0], "rank 5: cannot listen on h:0 .*Address already in use"),
    ],
)
def test_a_rank_listens_on_the_first_free_port(
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


@pytest.mark.parametrize(
    ("far", "says"),
    [
        ({"unix_address": "x" * 200}, "rank 6 on this host: AF_UNIX path too long"),
        *(({"tcp_address": [host, port]}, "rank 6 on ")
          for host, port in (("h\0", 80), (5, 80), ("127.0.0.1", 99999), ("127.0.0.1", "80"),
                             ("127.0.0.1", float("inf")), ([{}], None))),
    ],
)  # fmt: skip
def test_connections_of_a_meeting_that_fails_are_closed(
    far: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Rank 5 lets rank 4 in; there is no way to rank 6."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        near = facts(5, unix_address=listener.getsockname()[1:].decode())

        def act(side: int) -> Any:
            if side:
                with met(HashStore(), 4, token_file=str(token_file(tmp_path))) as one:
                    wanted = [
                        (near, "control", False),
                        (facts(6, **far), "data", "tcp_address" in far),
                    ]
                    return one.connect(wanted)
            with listener.accept()[0] as sock:
                accept(sock, TOKEN, 5)
                sock.settimeout(PATIENCE)
                return sock.recv(1)

        found = both(act)
    assert found[0] == b""
    assert type(found[1]) is SetupError and f"rank 4: cannot reach {says}" in str(found[1])
