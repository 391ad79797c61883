"""Links over soft-RoCE: settings, lost packets, and a card that fails.

Runs in the guest of ``vm.py``; ``test_soft_roce.py`` starts it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import TransportError
from megatron.dpp.transport.base import Transport
from megatron.dpp.transport.options import RdmaOptions
from tests.rdma import guest
from tests.rdma.guest import HOSTS
from tests.transport import kinds
from tests.transport.blackouts import survive
from tests.transport.kinds import forked, open_from_file, pair, take_next

kinds.PATIENCE = guest.PATIENCE

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(3 * guest.PATIENCE)]
ROCE_PORT = 4791
IPV4, UDP = 0x0800, 17
MESSAGE = torch.arange(1 << 18, dtype=torch.int32)


def on_both_hosts(
    folder: Path, body: Callable[[int, Transport, Any], None], kind: str = "rdma", **settings: Any
) -> Iterator[Any]:
    """The results that ``body(rank, transport, results)`` puts, in their order.

    The hosts see each other's devices, so the ranks take turns as if they shared a node.
    """

    def run(rank: int, path: str, results: Any) -> None:
        HOSTS.enter(rank)
        os.environ["LOCAL_RANK"] = str(rank)
        options = {"node_ips": HOSTS.addresses[rank], "rdma": RdmaOptions(**settings)}
        channels = pair(MESSAGE.nbytes)[1:]
        with open_from_file(kind, channels, rank, path, **options) as transport:
            body(rank, transport, results)

    with forked(2, run, folder) as (_, results):
        while True:
            yield results.get(timeout=kinds.PATIENCE)


def swap(transport: Transport, number: int = 0) -> None:
    """Send a message, and take the other rank's."""
    transport.put(0, MESSAGE, iteration=0, microbatch=number)
    assert torch.equal(take_next(transport, 0, number).tensor, MESSAGE)


def told(folder: Path, **settings: Any) -> list[str]:
    """The reasons of the link in both ranks' logs, after a message each way."""

    def body(rank: int, transport: Transport, results: Any) -> None:
        swap(transport)
        transport.flush(kinds.PATIENCE)
        results.put((rank, transport.links()[0].reason))

    both = on_both_hosts(folder, body, **settings)
    reasons = sorted([next(both), next(both)])
    return [reason for _, reason in reasons]


@pytest.fixture(autouse=True)
def control() -> None:
    guest.control()


def test_settings_without_flags_are_those_of_nccl_and_ucx(tmp_path: Path) -> None:
    for rank, reason in enumerate(told(tmp_path)):
        assert f"; rdma{rank} port 1, RoCE v2, GID index 1, traffic class 106," in reason
        assert reason.endswith("time-out 20, retries 7")


def test_the_device_has_the_settings_of_the_flags_and_packets_the_class(tmp_path: Path) -> None:
    """Linux 6.1's soft-RoCE keeps no service level, and has one partition key."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(IPV4)) as heard:
        heard.bind(("wire1", IPV4))
        reasons = told(tmp_path, traffic_class=160, timeout=16, retries=5, gid_index=1)
        heard.setblocking(False)
        classes = set(_classes(heard))
    assert classes == {160}
    for reason in reasons:
        assert "GID index 1, traffic class 160," in reason and "time-out 16, retries 5" in reason


def _classes(heard: socket.socket) -> Iterator[int]:
    """Traffic classes of the RoCE packets that a socket has received."""
    while True:
        try:
            packet = heard.recv(1 << 16)
        except BlockingIOError:
            return
        payload = 4 * (packet[0] & 15)
        to = int.from_bytes(packet[payload + 2 : payload + 4], "big")
        if packet[9] == UDP and to == ROCE_PORT:
            yield packet[1]


def test_the_named_devices_carry_the_messages(tmp_path: Path) -> None:
    before = [guest.sent_bytes(wire) for wire in range(4)]
    reasons = told(tmp_path, devices="rdma2,rdma3:1")
    sent = [guest.sent_bytes(wire) - before[wire] for wire in range(4)]
    for rank, reason in enumerate(reasons):
        assert f"; rdma{rank + 2} port 1, RoCE v2, GID index 1," in reason
    assert min(sent[2:]) > MESSAGE.nbytes and max(sent[:2]) < MESSAGE.nbytes // 10, sent


def test_ranks_take_turns_with_all_devices(tmp_path: Path) -> None:
    for rank, reason in enumerate(told(tmp_path, devices="nearest", adaptive_routing="on")):
        assert f"; rdma{rank} port 1, RoCE v2," in reason and "adaptive routing" in reason


@pytest.mark.parametrize("seconds", [2.0, 5.0, 20.0])
def test_a_blackout_is_survived_without_a_lost_message(seconds: float, tmp_path: Path) -> None:
    survive("rdma", HOSTS, seconds, tmp_path)


def until_an_error(rank: int, transport: Transport, results: Any, number: int = 0) -> None:
    """Swap messages, from a number on, until there is an error, and report it."""
    try:
        while True:
            swap(transport, number)
            number += 1
            if number == 3:
                results.put((rank, "flows"))
    except TransportError as error:
        results.put((rank, str(error)))


def test_a_link_whose_packets_are_lost_from_the_start_is_tcp(tmp_path: Path) -> None:
    """As behind a firewall: queue pairs connect, and nothing arrives."""

    def body(rank: int, transport: Transport, results: Any) -> None:
        swap(transport)
        transport.flush(kinds.PATIENCE)
        link = transport.links()[0]
        results.put((rank, link.kind, link.reason))

    HOSTS.lose_rdma()
    try:
        both = on_both_hosts(tmp_path, body, "auto")
        found = [next(both), next(both)]
    finally:
        HOSTS.restore()
    assert {kind for _, kind, _ in found} == {"tcp"}, found
    assert len({reason for _, _, reason in found}) == 1, found
    assert found[0][2].endswith(" port 1 has not completed after 13.6 s]"), found


def test_a_path_is_given_up_after_the_retries_of_the_flags(tmp_path: Path) -> None:
    """67 ms twice; the default is half a minute."""
    both = on_both_hosts(tmp_path, until_an_error, timeout=14, retries=2)
    try:
        assert {next(both)[1], next(both)[1]} == {"flows"}
        HOSTS.lose_rdma()
        start = time.monotonic()
        said = " ".join(text for _, text in (next(both), next(both)))
        print(f"given up after {time.monotonic() - start:.1f} s")
    finally:
        HOSTS.restore()
    assert "cannot be reached over RDMA any more: transport retry counter exceeded" in said, said
    assert " on rdma0 port 1" in said or " on rdma1 port 1" in said


def test_a_card_that_fails_is_named(tmp_path: Path) -> None:
    """The last test: its wire loses its routes."""

    def body(rank: int, transport: Transport, results: Any) -> None:
        swap(transport)
        results.put((rank, "flows"))
        guest.wait_until(lambda: _state(rank) == "DOWN")
        time.sleep(1.0)  # until the port's event is there
        until_an_error(rank, transport, results, 1)

    both = on_both_hosts(tmp_path, body, devices="rdma2,rdma3")
    assert {next(both)[1], next(both)[1]} == {"flows"}
    guest.run("ip", "link", "set", "wire3", "down")
    for _, said in (next(both), next(both)):
        assert "cannot be reached over RDMA any more" in said, said
        assert " on rdma2 port 1, which is down" in said or " on rdma3 port 1, which is" in said


def _state(rank: int) -> str:
    """State of the port of a rank's second device."""
    state = Path(f"/sys/class/infiniband/rdma{rank + 2}/ports/1/state").read_text()
    return state.split()[-1]
