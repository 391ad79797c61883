"""Rules of a set-up, one side at a time: deadlines, lengths, guests, faults and ports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import AuthError, ProtocolError, SetupError, TransportUnavailable
from megatron.dpp.transport import TransportOptions, handshake, rendezvous
from megatron.dpp.transport.admission import Connection
from megatron.dpp.transport.joining import PeerLink, link_faults
from megatron.dpp.transport.kinds import cuda_ipc, rdma
from megatron.dpp.transport.options import RdmaOptions
from megatron.dpp.transport.rdma_places import Place
from megatron.dpp.transport.rdma_ports import Node, choose_place, choose_places
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport.kinds import PATIENCE, proof_of
from tests.transport.test_choice import facts
from tests.transport.test_meeting import exchanged

TOKEN = b"0123456789abcdef"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(PATIENCE)
        yield ours, theirs


def test_a_message_that_announces_too_much_is_refused_before_it_is_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    longest = {"key": "x" * (handshake.MAX_HELLO - len('{"key": ""}'))}
    handshake.send_message(theirs, longest)
    assert handshake.receive_message(ours) == (longest, [])
    with pytest.raises(ProtocolError, match="a set-up message of 4097 bytes; the limit is 4096"):
        handshake.send_message(theirs, {"key": longest["key"] + "x"})
    theirs.sendall(struct.pack("<H", handshake.MAX_HELLO + 1) + b"{")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="it announces 4097 bytes"):
        handshake.receive_message(ours)
    assert ours.recv(2) == b"{"


def test_both_messages_of_a_proof_have_one_deadline(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + len(asked))

    def receive(sock: socket.socket, *, until: float | None = None) -> Any:
        asked.append(until)
        return {"rank": 1, "purpose": "p", "nonce": "n", "proof": proof}, []

    proof = proof_of("acceptor", 0, 1, "n", "n", "p", TOKEN)
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_hex=lambda _: "n"))
    monkeypatch.setattr(handshake, "time", clock)
    monkeypatch.setattr(handshake, "receive_message", receive)
    with pytest.raises(AuthError, match="claims to be rank 1 has a wrong proof"):
        handshake.accept_side(ends[0], TOKEN, 0)
    assert asked == [100.0 + handshake.HELLO_SECONDS] * 2
    asked.clear()
    with pytest.raises(AuthError, match="did not let us in"):
        handshake.connect_side(ends[0], TOKEN, 0, 1, "p", 7.0)
    assert asked == [107.0] * 2


def test_a_guest_that_nobody_waits_for_is_hung_up_on(
    met: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's own ranks too: a second connection of one name, and one that no link has."""
    names = [(9, "control"), (2, "control"), (2, "data 0"), (2, "control"), (3, "control")]
    pairs = [socket.socketpair() for _ in names]
    guests = [Connection(*name, pair[0]) for name, pair in zip(names, pairs, strict=True)]
    coming = iter([guests[:4], guests[4:]])
    admission = SimpleNamespace(
        proven=lambda: next(coming), crowded=False, accept=lambda: None, close=lambda: None
    )
    monkeypatch.setattr(rendezvous, "Admission", lambda *given: admission)
    monkeypatch.setattr(selectors.DefaultSelector, "select", lambda *given: [])
    made = met.connect([(facts(rank), "control", False) for rank in (2, 3)])
    assert made == {(2, "control"): guests[1], (3, "control"): guests[4]}
    assert [guest.sock.fileno() >= 0 for guest in guests] == [False, True, False, False, True]
    for one_end, other in pairs:
        one_end.close()
        other.close()


def test_both_ends_say_what_the_lower_rank_says_where_both_fail(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    found: dict[int, dict[int, str]] = {}

    def compare(rank: int) -> None:
        link = PeerLink(
            rank=rank, peer=1 - rank, sock=ends[rank], incoming=[rank], outgoing=[1 - rank]
        )
        found[rank] = link_faults([link], lambda *given: None, lambda *given: f"of rank {rank}")

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {0: {1: "of rank 0"}, 1: {0: "of rank 0"}}


def test_a_pattern_that_was_not_begun_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    def refuse(*_: Any) -> None:
        raise SetupError("the card says no")

    for message in ({"seed": 1, "unwritten": ""}, {"fault": "the card says no"}):
        handshake.send_message(ends[1], message)
    link = PeerLink(rank=0, peer=1, sock=ends[0], incoming=[0], outgoing=[1])
    waited: list[PeerLink] = []
    found = link_faults([link], refuse, lambda *given: "", waited.append)
    assert handshake.receive_message(ends[1])[0]["unwritten"] == "the card says no"
    assert found == {1: "the card says no"} and waited == []


def test_a_long_fault_is_cut_alike_on_both_ends(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    fault = "\u00e9" * 5000
    handshake.send_message(ends[1], {"seed": 1, "unwritten": ""})
    handshake.send_message(ends[1], {"fault": ""})
    link = PeerLink(rank=0, peer=1, sock=ends[0], incoming=[0], outgoing=[1])
    found = link_faults([link], lambda *given: None, lambda *given: fault)
    said = [handshake.receive_message(ends[1])[0] for _ in range(2)]
    assert found == {1: said[1]["fault"]} == {1: fault[:400]}


@pytest.mark.parametrize("note", [b"\x00\x00\x03", b"\x01\x00\x03\x01", b"\x03\x00\x01\x01hi"])
def test_a_peer_that_gives_no_reason_has_closed(
    note: bytes, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[1].sendall(note)
    with pytest.raises(handshake.PeerEnded, match="it has closed its transport; its own message"):
        handshake.receive_message(ends[0])


def test_a_packet_has_the_length_that_it_announces() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for body in (b"{} ", b"{"):
            theirs.send(struct.pack("<H", 2) + body)
            with pytest.raises(ProtocolError, match=f"{len(body)} bytes where 2 were announced"):
                handshake.receive_message(ours)


def test_descriptors_of_a_link_that_sends_nothing_are_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = PeerLink(rank=0, peer=1, sock=ours, incoming=[], outgoing=[])
    cuda = SimpleNamespace(
        ahead_fault=lambda peer: "", write_pattern=lambda *_: None, pattern_fault=lambda *_: ""
    )
    extension = SimpleNamespace(CudaLinks=lambda *_: cuda)
    setup: Any = SimpleNamespace(
        extension=extension, native=None, gpu=0, options=TransportOptions()
    )
    with ours, theirs, open("/dev/null") as given:
        handshake.send_message(theirs, {}, [given.fileno()])
        for message in ({}, {"seed": 1, "unwritten": ""}, {"fault": ""}):
            handshake.send_message(theirs, message)
        before = len(os.listdir("/proc/self/fd"))
        assert cuda_ipc.join(setup, [link]) == {}
        assert len(os.listdir("/proc/self/fd")) == before


# Rendezvous ---------------------------------------------------------------------------------------


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Rendezvous]:
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_bytes(TOKEN)
    options = TransportOptions(setup_timeout=PATIENCE, token_file=str(secret))
    with Rendezvous(HashStore(), 4, options) as one:
        yield one


def test_facts_in_the_place_of_another_ranks_are_broken() -> None:
    with pytest.raises(ProtocolError, match="broken facts of rank 1: they are of rank 2"):
        exchanged(facts(0), facts(2))


def test_connections_of_a_meeting_that_fails_are_closed(met: Rendezvous) -> None:
    """Rank 5 lets rank 4 in; there is no way to rank 6."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        address = listener.getsockname()[1:].decode()
        heard: list[bytes] = []

        def let_in() -> None:
            with listener.accept()[0] as sock:
                handshake.accept_side(sock, TOKEN, 5)
                sock.settimeout(PATIENCE)
                heard.append(sock.recv(1))

        thread = threading.Thread(target=let_in)
        thread.start()
        far = facts(6, unix_address="x" * 200)
        with pytest.raises(SetupError, match="rank 4: cannot reach rank 6 on this host: AF_UNIX p"):
            met.connect([(facts(5, unix_address=address), "control", False), (far, "data", False)])
        thread.join(PATIENCE)
    assert heard == [b""]


# RDMA ---------------------------------------------------------------------------------------------


PORT = Place("a", 1, 3, infiniband=False)


class Side:
    """One end of a link of a card: it connects, and delivers unless it is told what else."""

    def __init__(self, card: Card, peer: int, device: str, gpudirect: str) -> None:
        self._card, self._peer, self._device = card, peer, device
        self.in_host_memory = peer not in card.on_gpu or gpudirect == "off"
        self.gpu_way = None if self.in_host_memory else "in place"

    def offer(self) -> dict[str, Any]:
        return {}

    def connect(self, theirs: Any) -> None:
        pass

    def post_pattern(self, test: str, seed: int) -> None:
        self._card.tested.append((self._peer, self._device, test))

    def await_pattern(self, seconds: float) -> bool:
        return True

    def pattern_fault(self, test: str, seed: int) -> str:
        place = "slots on the GPU" if not self.in_host_memory and test == "slots" else test
        return self._card.undelivered.get((self._peer, place), "")

    def attributes(self) -> dict[str, Any]:
        names = ("gid_index", "traffic_class", "service_level", "pkey_index", "timeout", "retries")
        return dict.fromkeys(names, 0)


class Card:
    """The set-up of one rank whose card has links as a test wants them.

    Args:
        broken: pairs of peer and device that cannot be set up, with the reason.
        undelivered: pairs of peer and test that do not deliver.
        on_gpu: peers whose slots are on a GPU.
    """

    def __init__(
        self,
        rank: int,
        places: list[Place],
        peers: dict[int, list[Place]],
        *,
        others: set[int] | None = None,
        broken: dict[tuple[int, str], str] | None = None,
        undelivered: dict[tuple[int, str], str] | None = None,
        on_gpu: set[int] | None = None,
        gpudirect: str = "auto",
    ) -> None:
        self.tested: list[tuple[int, str, str]] = []
        self.dropped: list[int] = []
        self.broken, self.undelivered = broken or {}, undelivered or {}
        self.on_gpu = on_gpu or set()

        def found(ports: list[Place]) -> dict[str, Any]:
            return {"rdma": {"places": [dataclasses.asdict(port) for port in ports]}}

        self.setup: Any = SimpleNamespace(
            extension=self, native=SimpleNamespace(drop_link=self.dropped.append),
            options=TransportOptions(gpudirect=gpudirect), failed={},
            has_other_kind=set() if others is None else others, gpu=0,
            facts=facts(rank, found=found(places)),
            peer_facts={peer: facts(peer, found=found(ports)) for peer, ports in peers.items()},
        )  # fmt: skip

    def RdmaLink(
        self, native: Any, peer: int, *_: Any, device: str, gpudirect: str, **__: Any
    ) -> Side:
        if (peer, device) in self.broken:
            raise SetupError(self.broken[peer, device])
        return Side(self, peer, device, gpudirect)


def joined(card: Card, peers: dict[int, Card]) -> dict[int, str]:
    """The notes of rank 0 on its links with the peers, each of which joins its own end."""
    links, ended = [], list[threading.Thread]()
    with contextlib.ExitStack() as stack:
        for peer, theirs in peers.items():
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in ends:
                stack.enter_context(end).settimeout(PATIENCE)
            links.append(PeerLink(rank=0, peer=peer, sock=ends[0], incoming=[], outgoing=[0]))
            back = PeerLink(rank=peer, peer=0, sock=ends[1], incoming=[0], outgoing=[])
            ended.append(threading.Thread(target=rdma.join, args=(theirs.setup, [back])))
            ended[-1].start()
        try:
            return dict(rdma.join(card.setup, links))
        finally:
            for thread in ended:
                thread.join(PATIENCE)


@pytest.mark.parametrize("said", [("first", "later"), ("", "later")])
def test_what_a_peer_says_first_counts(
    said: tuple[str, str], ends: tuple[socket.socket, socket.socket]
) -> None:
    card = Card(0, [PORT], {1: [PORT]}, others={1})
    for text in said:
        handshake.send_message(ends[1], {"failed": text, "rdma": {}})
    link = PeerLink(rank=0, peer=1, sock=ends[0], incoming=[], outgoing=[0])
    assert rdma.join(card.setup, [link]) == {}
    assert card.setup.failed == {1: said[0] or said[1]} and card.dropped == [1]


def test_only_links_that_do_not_work_are_tried_over_their_next_ports() -> None:
    """Rank 1 is reached at once, rank 2 over its second port, and rank 3 has no second one."""
    near = [PORT, dataclasses.replace(PORT, device="b", distance=2, subnet="s")]
    far = {1: [near[1]], 2: [near[1]], 3: [PORT]}
    card = Card(0, near, far, others={3}, broken={(2, "a"): "no cable", (3, "a"): "no switch"})
    peers = {peer: Card(peer, ports, {0: near}, others={0}) for peer, ports in far.items()}
    found = joined(card, peers)
    assert set(found) == {1, 2}
    assert found[1].startswith("; a port 1, ") and "[" not in found[1]
    assert found[2].startswith("; b port 1, ") and found[2].endswith(" [rank 0: no cable]")
    assert card.setup.failed == {3: "rank 0: no switch"}, "it goes to another kind"
    assert set(card.tested) == {
        (peer, device, test) for peer, device in ((1, "a"), (2, "b")) for test in ("path", "slots")
    }


def test_slots_on_a_gpu_are_not_tested_with_those_of_the_host() -> None:
    """A link whose slots on a GPU get nothing is staged, not dropped."""
    far = {peer: [PORT] for peer in (1, 2, 3)}
    undelivered = {(2, "path"): "zeros", (3, "slots on the GPU"): "zeros"}
    card = Card(0, [PORT], far, others={2}, undelivered=undelivered, on_gpu={3})
    peers = {
        peer: Card(peer, [PORT], {0: [PORT]}, others={0}, on_gpu={0} if peer == 3 else set())
        for peer in far
    }
    found = joined(card, peers)
    assert set(found) == {1, 3} and "zeros" in card.setup.failed[2]
    assert "staged in the host's memory" in found[3] and "staged" not in found[1]
    assert [test for peer, _, test in card.tested if peer == 2] == ["path"]
    assert [test for peer, _, test in card.tested if peer == 3] == ["path", "slots"] * 2
    assert card.dropped == [2, 3]


@pytest.mark.parametrize(("gpu", "possible"), [(0, True), (-1, False)])
def test_gpudirect_can_be_asked_for_with_any_gpu(gpu: int, possible: bool) -> None:
    place = {"device": "mlx5_0", "port": 1, "gid_index": 3, "infiniband": False}
    setup: Any = SimpleNamespace(
        options=TransportOptions(gpudirect="on"), has_other_kind=set(), failed={}, gpu=gpu,
        facts=facts(0, found={"rdma": {"places": [place]}}),
    )  # fmt: skip
    if possible:
        assert rdma.join(setup, []) == {}
        return
    with pytest.raises(TransportUnavailable, match="rank 0 has no GPU of NVIDIA"):
        rdma.join(setup, [])


@pytest.mark.parametrize(
    ("gpudirect", "peer", "falls_back"),
    [("auto", 1, True), ("off", 1, True), ("on", 1, False), ("auto", 2, False)],
)
def test_a_fault_of_rdma_ends_the_set_up_unless_the_link_may_be_of_another_kind(
    gpudirect: str, peer: int, falls_back: bool, ends: tuple[socket.socket, socket.socket]
) -> None:
    card = Card(
        0, [PORT], {peer: [PORT]}, others={1}, broken={(peer, "a"): "the card\nsays no"},
        gpudirect=gpudirect,
    )  # fmt: skip
    link = PeerLink(rank=0, peer=peer, sock=ends[0], incoming=[], outgoing=[0])
    for _ in range(2):
        handshake.send_message(ends[1], {"failed": ""})
    if falls_back:
        assert rdma.join(card.setup, [link]) == {}
        assert card.setup.failed == {1: "rank 0: the card says no"}
        return
    with pytest.raises(SetupError, match="says no"):
        rdma.join(card.setup, [link])
    assert card.setup.failed == {}


ADDRESS = "00000000000000000000ffff0a000005"  # 10.0.0.5


def port_with(*gids: tuple[int, str, str]) -> dict[str, Any]:
    place = {"device": "mlx5_0", "port": 1, "infiniband": False, "active": True}
    return {**place, "addresses": list(gids)}


def test_the_first_index_of_an_address_can_be_asked_for() -> None:
    other = ADDRESS[:-1] + "6"
    port = port_with((0, other, "RoCE v2"), (3, ADDRESS, "RoCE v2"))
    for asked, taken in ((-1, 3), (0, 0), (3, 3)):
        place, _ = choose_place([port], "10.0.0.5", Node(), gid_index=asked)
        assert place is not None and place.gid_index == taken


def test_a_named_port_without_an_address_is_not_taken() -> None:
    bare, whole = port_with(), {**port_with((2, ADDRESS, "RoCE v2")), "device": "mlx5_1"}
    for ports, device in (([bare, whole], "mlx5_1"), ([bare], None)):
        options = RdmaOptions(devices="mlx5_0,mlx5_1")
        places, why = choose_places(ports, options, "10.0.0.5", Node(), "node")
        assert [place.device for place in places] == ([device] if device else [])
        assert places or "no such active port (there are mlx5_0 port 1)" in why
