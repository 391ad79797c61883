"""Hostile input in volume, while ranks meet: typed errors, and nothing left behind.

``test_hostile_wire.py`` does the same with connected transports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import TransportError
from megatron.dpp.transport import TransportOptions, handshake, meet, open_transport
from megatron.dpp.transport.joining import PeerLink, link_faults
from megatron.dpp.transport.kinds import cuda_ipc, rdma
from megatron.dpp.transport.native import load_native
from tests.transport.hostile import framed, text_of
from tests.transport.kinds import PATIENCE, of_rank, pair, proof_of
from tests.transport.meeting import TOKEN, accept, census, facts, until_no_more_than

NONCE = "0123456789abcdef" * 2
TYPES = (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
Target = Callable[[random.Random], None]


@pytest.fixture(autouse=True)
def known_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' nonces, so that a test writes all of a handshake before it begins."""
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_hex=lambda _: NONCE))


@contextlib.contextmanager
def said(rng: random.Random, *messages: Any, most_fds: int = 0) -> Iterator[socket.socket]:
    """A connection on which another end has sent mutated messages and then ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, rng.choice(TYPES))
    wrong = rng.randrange(len(messages) + 1)
    with ours, theirs:
        ours.settimeout(PATIENCE)
        for index, message in enumerate(messages):
            right = index != wrong
            body = json.dumps(message).encode() if right else text_of(rng, message)
            frame = len(body).to_bytes(2, "little") + body if right else framed(rng, body)
            fds = [theirs.fileno()] * rng.choice((0, 0, 0, 1, 2, 3)) if most_fds else []
            with contextlib.suppress(OSError):  # it has ended, or takes no more
                socket.send_fds(theirs, [frame], fds, socket.MSG_DONTWAIT)
        if rng.random() < 0.1:
            theirs.send(rng.randbytes(40))
        if rng.random() < 0.5:
            theirs.shutdown(socket.SHUT_WR)
        else:
            theirs.close()
        yield ours


# Targets: each reads one hostile input ------------------------------------------------------------


def reads_a_message(rng: random.Random) -> None:
    most = rng.randrange(3)
    with said(rng, {"channels": [[0, 0, 1024, 2]]}, most_fds=3) as ours:
        link = PeerLink(rank=0, peer=1, sock=ours, incoming=[], outgoing=[])
        message, fds = link.receive(most, 0)
        for fd in fds:
            os.close(fd)
        assert isinstance(message, dict) and len(fds) <= most


def accepts_a_connection(rng: random.Random) -> None:
    hello = {"rank": 1, "purpose": "control", "nonce": NONCE}
    proof = proof_of("connector", 1, 0, NONCE, NONCE, "control", TOKEN)
    with said(rng, hello, {"proof": proof}) as ours:
        try:
            assert accept(ours, TOKEN, 0) == (1, "control"), "it has proven no other"
        except OSError as error:
            raise TransportError("it has hung up") from error


def connects(rng: random.Random) -> None:
    proof = proof_of("acceptor", 0, 1, NONCE, NONCE, "control", TOKEN)
    answer = {"rank": 1, "nonce": NONCE, "proof": proof}
    with said(rng, answer, {"welcome": True}) as ours:
        handshake.connect_side(ours, TOKEN, 0, 1, "control", PATIENCE)


def reads_facts(rng: random.Random) -> None:
    place = {"device": "mlx5_0", "port": 1, "gid_index": 3, "infiniband": False}
    settings = {"checksum": False, "workload": 1 << 20, "tcp_connections": 4}
    own = facts(0, settings=settings, gpu_access={"x": True}, found={"rdma": {"places": [place]}})
    theirs = dataclasses.asdict(dataclasses.replace(own, rank=1))
    text = text_of(rng, theirs).decode(errors="replace")
    found = meet._read_facts(text, 1, own, "the store")
    rdma.obstacle(own, found)
    cuda_ipc.obstacle(own, found)


def compares_patterns(rng: random.Random) -> None:
    with said(rng, {"seed": 5, "unwritten": ""}, {"fault": ""}) as ours:
        link = PeerLink(rank=0, peer=1, sock=ours, incoming=[0], outgoing=[])

        def fault_of(_: PeerLink, seed: int) -> str:
            assert type(seed) is int and 0 <= seed < 1 << 64, "as C++ takes it"
            return ""

        link_faults([link], lambda *_: None, fault_of)


def opens_gpu_memory(rng: random.Random) -> None:
    def use(peer: int, channels: Any, control: int, handle: bytes, memory: int) -> None:
        for fd in (control, memory):
            if fd >= 0:
                os.close(fd)

    with said(rng, {"handle": "00" * 64}, most_fds=3) as ours:
        outgoing = [0] * rng.randrange(2)
        link = PeerLink(rank=0, peer=1, sock=ours, incoming=[], outgoing=outgoing)
        cuda_ipc._open(SimpleNamespace(use_ipc_slots=use), link)


def hears_of_rdma(rng: random.Random) -> None:
    setup: Any = SimpleNamespace(options=TransportOptions(), has_other_kind={1}, failed={})
    joining = rdma.Joining(setup, {})
    with said(rng, {"failed": "no room"}) as ours:
        link = PeerLink(rank=0, peer=1, sock=ours, incoming=[], outgoing=[0])
        joining.hear(link, link.receive()[0])
        link.send({"failed": joining.fault(link)})


class Peer:
    """Rank 0, which proves itself to rank 1 and then says something else than it should."""

    def __init__(self, rng: random.Random, store: HashStore) -> None:
        self._rng, self._store = rng, store
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(TransportError, OSError), contextlib.ExitStack() as stack:
            own = json.loads(self._store.get("dpp/main/1/facts/1"))
            self._store.set("dpp/main/1/facts/0", json.dumps({**own, "rank": 0}))
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(PATIENCE)
            sock.connect("\0" + own["unix_address"])
            token = self._store.get("dpp/main/1/token")
            handshake.connect_side(sock, token, 0, 1, "control", PATIENCE)
            self._set_up(sock, stack)

    def _set_up(self, sock: socket.socket, stack: contextlib.ExitStack) -> None:
        channel = of_rank(pair(), 1)[2]
        settings = {"timeout": 1.0, "checksum": False, "max_pending": 2, "spin": False}
        fields = (1, 0, channel.chunk, int(channel.direction), channel.slot_bytes, channel.depth)
        native = load_native().Transport(rank=0, incoming=[fields], outgoing=[], **settings)
        stack.callback(native.close)
        native.add_peer(1, "rank 1", sock.dup().detach(), -1, -1)
        rounds: list[tuple[Any, list[int]]] = [
            ({}, [native.bell_fd()]),
            ({"channels": [list(fields[2:])]}, []),
            ({}, [native.make_shm_slots(1, [0])]),
        ]
        wrong = self._rng.randrange(len(rounds) + 1)
        for index, (message, fds) in enumerate(rounds):
            body = json.dumps(message).encode()
            frame = len(body).to_bytes(2, "little") + body
            if index == wrong and self._rng.random() < 0.4:
                frame = framed(self._rng, text_of(self._rng, message))
            elif index == wrong:
                fds = self._odd_descriptors(fds, stack)
            socket.send_fds(sock, [frame], fds)
        sock.recv(1)  # until rank 1 has ended, or has read all

    def _odd_descriptors(self, right: list[int], stack: contextlib.ExitStack) -> list[int]:
        ways = (os.memfd_create("odd", os.MFD_ALLOW_SEALING), os.open("/dev/zero", os.O_RDWR),
                os.open("/tmp", os.O_RDONLY), os.eventfd(0))  # fmt: skip
        for fd in ways:
            stack.callback(os.close, fd)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        os.ftruncate(ways[0], self._rng.choice((0, 1, 4095, 4096, 4097, 1 << 40)))
        if self._rng.random() < 0.7:
            fcntl.fcntl(ways[0], fcntl.F_ADD_SEALS, seals)
        return [self._rng.choice((*ways, *right)) for _ in range(self._rng.choice((0, 1, 1, 1, 2)))]


def opens_a_transport(rng: random.Random) -> None:
    store = HashStore()
    peer = Peer(rng, store)
    options = TransportOptions(setup_timeout=PATIENCE)
    try:
        made = open_transport(of_rank(pair(), 1), rank=1, store=store, kind="shm", options=options)
        made.close()
    finally:
        peer.thread.join(PATIENCE)


TARGETS: tuple[Target, ...] = (
    reads_a_message, accepts_a_connection, connects, reads_facts, compares_patterns,
    opens_gpu_memory, hears_of_rdma,
)  # fmt: skip


def bombard(target: Target, count: int, seed: int) -> int:
    """Feed seeded inputs to a target; returns how many it refused. Nothing may stay open."""
    torch.zeros(1 << 20)  # PyTorch keeps the threads of its first large operation
    before, refused = census(), 0
    for number in range(count):
        rng = random.Random(f"{target.__name__} {seed} {number}")
        try:
            target(rng)
        except TransportError as error:
            assert str(error), "an error has a text"
            str(error).encode(errors="backslashreplace")
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{target.__name__}, seed {seed}, input {number}") from error
    until_no_more_than(before)
    return refused


@pytest.mark.parametrize(
    ("count", "seed"), [(400, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.timeout(1800)
def test_hostile_input_is_a_typed_error(target: Target, count: int, seed: int) -> None:
    assert bombard(target, count, seed) > count // 4


@pytest.mark.parametrize(
    ("count", "seed"), [(80, 1), pytest.param(2000, 2, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_a_hostile_member_of_the_job_ends_a_start_with_a_typed_error(count: int, seed: int) -> None:
    assert bombard(opens_a_transport, count, seed) > count // 4
