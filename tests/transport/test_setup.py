"""Messages about a peer whose set-up fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import (
    PeerDead,
    ProtocolError,
    SetupError,
    TransportError,
    VersionMismatch,
)
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    TransportOptions,
    handshake,
    open_transport,
    opening,
)
from megatron.dpp.transport.joining import Facts, PeerLink
from megatron.dpp.transport.native import load_native
from tests.transport.kinds import (
    PATIENCE,
    Library,
    Wrapped,
    of_rank,
    opened,
    pair,
    prepared,
    take_next,
)

REASON = "123 bytes of shared memory: Cannot allocate memory"


def fail_on_rank_1(patch: pytest.MonkeyPatch, call: str) -> None:
    """Let a call of the extension fail on rank 1."""

    def wrap(native: Any, rank: int) -> Any:
        return Wrapped(native, call, SetupError(REASON)) if rank == 1 else native

    library = Library(wrap)
    patch.setattr(opening, "load_native", lambda: library)


def errors_of(kind: str, patience: float = PATIENCE) -> dict[int, TransportError]:
    """Of opening, which waits for so many seconds, and of waiting for a message, by rank."""
    store, errors = HashStore(), {}

    def run(rank: int) -> None:
        options = TransportOptions(setup_timeout=patience)
        try:
            mine = of_rank(pair(), rank)
            with open_transport(mine, rank=rank, store=store, kind=kind, options=options) as end:
                deadline = time.monotonic() + PATIENCE
                while time.monotonic() < deadline:
                    end.poll()
                    end.wait(0.2)
        except TransportError as error:
            errors[rank] = error

    with prepared(kind):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
    return errors


def error_of_rank_0(kind: str, patience: float = PATIENCE) -> TransportError:
    """Rank 1 cannot open."""
    errors = errors_of(kind, patience)
    assert str(errors[1]) == REASON
    return errors[0]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_link_may_have_thousands_of_channels(kind: str) -> None:
    """250 were too many for a set-up message, whose length the error gave."""
    many = [ChannelSpec(0, 1, chunk, Direction.FORWARD, 64, 1) for chunk in range(2049)]
    with opened(kind, many) as (sender, receiver):
        sender.put(2048, torch.ones(4), iteration=0, microbatch=0)
        assert take_next(receiver, 2048, 0).tensor.tolist() == [1.0] * 4


def test_one_of_thousands_of_channels_that_differs_is_noticed() -> None:
    many = [ChannelSpec(0, 1, chunk, Direction.FORWARD, 64, 1) for chunk in range(2049)]
    other = [*many[:-1], dataclasses.replace(many[-1], depth=2)]
    store, said = HashStore(), []

    def run(rank: int) -> None:
        options = TransportOptions(setup_timeout=PATIENCE)
        with contextlib.suppress(TransportError):
            try:
                specs = (many, other)[rank]
                open_transport(specs, rank=rank, store=store, kind="shm", options=options).close()
            except VersionMismatch as error:
                said.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert said and all("on the channels [2049, " in text for text in said)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_peer_that_fails_in_its_last_step_has_not_left_in_good_order(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_rank_1(monkeypatch, "start")
    error = error_of_rank_0(kind)
    assert type(error) is PeerDead
    assert f"rank 0: rank 1 gave up: SetupError: {REASON}" in str(error)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("step", ["add_peer", "its offer"])
def test_a_peer_that_fails_while_links_are_joined_is_named(
    kind: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PeerLink.send

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.rank == 1 and "channels" in message:
            raise SetupError(REASON)
        original(self, message, fds)

    if step == "add_peer":
        fail_on_rank_1(monkeypatch, step)
    else:
        monkeypatch.setattr(PeerLink, "send", send)
    # Rank 1's error keeps its socket here, so that rank 0 waits as long as it may.
    error = error_of_rank_0(kind, 3.0 if step == "add_peer" else PATIENCE)
    assert "rank 1" in str(error) and str(error).startswith("rank 0: ")
    assert type(error) is SetupError
    # Before it knows rank 0 as a peer it can only hang up.
    assert step == "add_peer" or f"rank 1 gave up: SetupError: {REASON}" in str(error)


@pytest.mark.parametrize("kind", ["cuda_ipc", "staged", "rdma"])
def test_a_peer_that_fails_while_a_kind_is_joined_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PeerLink.receive

    def fail(self: PeerLink, max_fds: int = 0) -> Any:
        message, fds = original(self, max_fds)
        if self.rank == 1 and ({"handle", "rdma"} & set(message) or len(fds) == 2):
            for fd in fds:
                os.close(fd)
            raise SetupError(REASON)
        return message, fds

    monkeypatch.setattr(PeerLink, "receive", fail)
    error = error_of_rank_0(kind)
    assert type(error) is SetupError
    text = (
        f"rank 0: the set-up of the links with rank 1 ended: rank 1 gave up: SetupError: {REASON}"
    )
    assert text in str(error)


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc", "staged"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_message_with_too_few_descriptors_is_refused(
    kind: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, sent = PeerLink.send, []

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.rank == 0 and fds:
            sent.append(fds)
        original(self, message, () if self.rank == 0 and len(sent) == nth else fds)

    monkeypatch.setattr(PeerLink, "send", send)
    error = errors_of(kind)[1]
    assert type(error) is ProtocolError
    assert re.search(r"rank 1: rank 0 sent 0 descriptors, expected \d", str(error))


GOOD = dataclasses.asdict(
    Facts(
        rank=1, abi=load_native().abi_version, host="h", hostname="n", uid=0, pid=1, device="cpu",
        unix_address="", tcp_address=("127.0.0.1", 1),
        settings={"checksum": False, "workload": 1 << 20, "tcp_connections": 4},
    )
)  # fmt: skip


def refused_facts(text: str) -> str:
    """The error of rank 0 where the store holds ``text`` as rank 1's facts."""
    store = HashStore()
    store.set("dpp/main/1/facts/1", text)
    options = TransportOptions(setup_timeout=0.5)
    with pytest.raises(TransportError) as caught:
        open_transport(of_rank(pair(), 0), rank=0, store=store, kind="shm", options=options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", json.dumps({"abi": GOOD["abi"]})])
def test_facts_that_are_none_are_named(text: str) -> None:
    said = refused_facts(text)
    assert said.startswith("ProtocolError: rank 0: the store holds broken facts of rank 1"), said


WRONG = [
    (field, value)
    for field in sorted(GOOD)
    for value in (7, "\ud800", None, [1], {"a": "\ud800"})
    if (field, value) not in (("uid", 7), ("pid", 7), ("tcp_address", None))
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=repr)
def test_facts_of_wrong_types_are_named(field: str, value: Any) -> None:
    said = refused_facts(json.dumps({**GOOD, field: value}))
    kind = "VersionMismatch" if field == "abi" and value in (7, None, [1]) else "ProtocolError"
    assert said.startswith(kind), said
    assert "rank 1" in said or kind == "VersionMismatch"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("tcp_address", ["h", float("inf")], "port inf, expected 1 to 65535"),
        ("tcp_address", ["h", 99999], "port 99999, expected 1 to 65535"),
        ("tcp_address", ["h", 0], "port 0, expected"),
        ("tcp_address", ["h", "80"], "port 80, expected"),
        ("tcp_address", ["h\0", 80], "host 'h"),
        ("tcp_address", [5, 80], "host '5'"),
        ("found", {"rdma": 5}, "found rdma is '5'"),
        ("found", {"rdma": {}}, "'places'"),
        ("found", {"rdma": {"places": [{}]}}, "missing 4 required"),
        ("found", {"rdma": {"places": [5]}}, "must be a mapping"),
        ("found", {"rdma": {"places": 5}}, "not iterable"),
    ],
)
def test_facts_with_wrong_contents_are_named(field: str, value: Any, text: str) -> None:
    said = refused_facts(json.dumps({**GOOD, field: value}))
    assert said.startswith("ProtocolError: rank 0: the store holds broken facts of rank 1"), said
    assert text in said


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        (b"", SetupError, "ended: its connection was closed; its own message says why"),
        (b"\0\0\2", SetupError, "ended: it has closed its transport"),
        (b"\4\0\3\1why", SetupError, "ended: why"),
        (b'\x0e\0{"a":"\\udfff"}', ProtocolError, "sent a broken set-up message: 'utf-8' codec"),
        (b"\2\0[]", ProtocolError, "rank 0: rank 1 sent a broken set-up message: not an object"),
    ],
)
def test_what_comes_instead_of_a_message_is_said(
    kind: int, sent: bytes, error: type[TransportError], text: str
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours:
        ours.settimeout(PATIENCE)
        with theirs:
            if sent:
                theirs.send(sent)
        with pytest.raises(error, match="rank 1") as caught, handshake.joining(0, 1, ours):
            handshake.receive_message(ours)
    assert type(caught.value) is error and text in str(caught.value)


INTERRUPTED = """
#include <cerrno>
#include <fcntl.h>
extern "C" int posix_fallocate(int fd, off_t from, off_t bytes) {
  static int calls = 0;
  if (calls++ < 2) return EINTR;
  return fallocate(fd, 0, from, bytes) == 0 ? 0 : errno;
}
"""
ALLOCATES = """
import importlib.util, sys
specification = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(specification)  # without PyTorch, which takes seconds
specification.loader.exec_module(native)
settings = dict(timeout=1.0, checksum=False, max_pending=2, spin=False)
native.Transport(rank=0, incoming=[], outgoing=[], **settings).close()
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the interrupted call with")
def test_memory_is_allocated_although_signals_come(tmp_path: Path) -> None:
    library = tmp_path / "interrupted.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=INTERRUPTED, text=True, check=True, timeout=PATIENCE)
    settings = {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES, load_native().__file__],
        env=os.environ | settings, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
