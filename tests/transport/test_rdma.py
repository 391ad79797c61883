"""RDMA links over a double of libibverbs that fails on demand, and the choice of the port."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import (
    ConfigError,
    PeerDead,
    ProtocolError,
    SetupError,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from megatron.dpp.transport import TransportOptions
from megatron.dpp.transport.choose import choose
from megatron.dpp.transport.joining import Facts, PeerLink
from megatron.dpp.transport.kinds import kinds_of_links, rdma
from megatron.dpp.transport.native import load_native
from megatron.dpp.transport.options import RdmaOptions
from megatron.dpp.transport.rdma_ports import (
    choose_named,
    choose_place,
    find_place,
    pci_distance,
)
from tests.transport.kinds import PATIENCE, REPOSITORY, fake_verbs, opened, pair, take_next

Trouble = Callable[[str, int], None]
MIB = 1 << 20


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    """Asks the double for a fault."""
    fake = fake_verbs()

    def ask(name: str, value: int) -> None:
        fake.fake_verbs_set(name.encode(), value)

    yield ask
    ask("reset", 0)


def until_failure(transport: object, seconds: float = PATIENCE) -> TransportError:
    """The error that a waiting rank gets."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            transport.poll()  # type: ignore[attr-defined]
            transport.wait(0.2)  # type: ignore[attr-defined]
        except TransportError as error:
            return error
    raise AssertionError("no failure was noticed")


@pytest.mark.parametrize("depth", [1, 3])
def test_large_messages_over_several_queue_pairs(depth: int) -> None:
    # More than a link's buffers hold at once, in pieces that no slot size divides.
    sizes = [5 * MIB + 4, 100, 9 * MIB, 4 * MIB - 4, 4 * MIB, 0, 7 * MIB + 12]
    sent = [torch.arange(size // 4, dtype=torch.int32) * 7 + size for size in sizes]
    with opened("rdma", pair(9 * MIB, depth), workload=1 << 18, checksum=True) as (a, b):
        for index, tensor in enumerate(sent):
            a.put(0, tensor, iteration=0, microbatch=index)
            b.put(0, tensor, iteration=0, microbatch=index)
        for index, tensor in enumerate(sent):
            assert torch.equal(take_next(b, 0, index).tensor, tensor)
            assert torch.equal(take_next(a, 0, index).tensor, tensor)
        a.flush(PATIENCE)
        b.flush(PATIENCE)


def test_pieces_are_no_larger_than_the_port_carries(trouble: Trouble) -> None:
    trouble("max-message", 100_000)
    tensor = torch.arange(MIB // 4, dtype=torch.int32)
    with opened("rdma", pair(MIB)) as (a, b):
        a.put(0, tensor, iteration=0, microbatch=0)
        assert torch.equal(take_next(b, 0, 0).tensor, tensor)


def test_what_was_put_arrives_although_its_sender_closes_at_once() -> None:
    tensor = torch.arange(2 * MIB, dtype=torch.int32)
    with opened("rdma", pair(tensor.nbytes)) as (a, b):
        a.put(0, tensor, iteration=0, microbatch=0)
        a.flush(PATIENCE)
        a.close()
        assert torch.equal(take_next(b, 0, 0).tensor, tensor)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (12, PeerDead, "cannot be reached over RDMA any more: transport retry counter exceeded"),
        (13, PeerDead, "RNR retry counter exceeded"),
        (10, ProtocolError, "refused an RDMA write: remote access error"),
        (4, SetupError, "failed: some error"),
    ],
)
def test_an_error_completion_is_named_on_both_sides(
    trouble: Trouble, status: int, error: type[TransportError], text: str
) -> None:
    with opened("rdma", pair()) as (a, b):
        trouble("error-status", status)
        a.put(0, torch.ones(10), iteration=0, microbatch=3)
        seen = until_failure(a)
        told = until_failure(b)
    assert type(seen) is error and type(told) is error
    assert text in str(seen) and "fake0 port 1" in str(seen) and "rank 1 (pid" in str(seen)
    assert text in str(told) and "reported by rank 0" in str(told)


@pytest.mark.parametrize("status", [2, 12])  # soft-RoCE's own error, and the usual one
def test_a_port_that_goes_down_is_named(trouble: Trouble, status: int) -> None:
    with opened("rdma", pair()) as (a, _):
        trouble("port-down", 1)
        time.sleep(0.1)  # the event comes before the failed send
        trouble("error-status", status)
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        seen = until_failure(a)
    assert type(seen) is PeerDead and "which is down: cable or switch" in str(seen)


def test_running_out_of_receives_is_an_error(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, _):
        trouble("lose-receives", 1)
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        assert "RNR retry counter exceeded" in str(until_failure(a))


def test_a_failure_inside_take_is_kept_and_told(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=7)
        while b.poll()[0] == 0:
            assert b.wait(PATIENCE)
        trouble("fail-post", 1)
        with pytest.raises(PeerDead, match="Cannot allocate memory") as caught:
            b.take(0)
        for call in (b.poll, lambda: b.take(0)):
            with pytest.raises(PeerDead, match="Cannot allocate memory"):
                call()
        told = until_failure(a)
    assert str(caught.value).startswith("rank 1: ")
    assert "reported by rank 1" in str(told)


def test_lost_completions_end_in_a_deadline_that_names_the_message(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        trouble("drop-completions", 1)
        a.put(1, torch.ones(10), iteration=4, microbatch=2)
        assert not b.wait(0.3)
        assert b.poll()[1] == 0
        overdue = b.overdue(1, 0.3, iteration=4, microbatch=2)
    assert isinstance(overdue, TransferTimeout)
    assert "microbatch 2 of iteration 4 (forward of chunk 1, rank 0 -> 1)" in str(overdue)


@pytest.mark.parametrize(
    ("fault", "text"),
    [("fail-registration", "ulimit -l unlimited"), ("fail-connection", "in one RDMA network")],
)
def test_what_the_device_refuses_at_set_up_is_said(trouble: Trouble, fault: str, text: str) -> None:
    trouble(fault, 100)  # both sides meet it
    with pytest.raises(SetupError) as caught, opened("rdma", pair(), setup_timeout=5.0):
        pass
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "times", "text"),
    [
        ("fail-registration", 1, "ulimit -l unlimited"),  # one rank alone meets it
        ("fail-registration", 100, "ulimit -l unlimited"),
        ("fail-connection", 100, "in one RDMA network"),
    ],
)
def test_auto_gives_links_that_cannot_be_set_up_to_tcp(
    trouble: Trouble, fault: str, times: int, text: str
) -> None:
    trouble(fault, times)
    large = torch.arange(MIB)
    with opened("auto", pair(large.nbytes)) as (a, b):
        links = [end.links()[0] for end in (a, b)]
        a.put(0, large, iteration=0, microbatch=0)
        assert torch.equal(take_next(b, 0, 0).tensor, large)
        b.put(0, large, iteration=0, microbatch=0)
        assert torch.equal(take_next(a, 0, 0).tensor, large)
    assert [link.kind for link in links] == ["tcp", "tcp"]
    for link in links:
        assert link.reason.startswith("different hosts") and "\n" not in link.reason
        assert "[rdma: rank " in link.reason and text in link.reason, link.reason
    if times == 1:
        assert links[0].reason == links[1].reason


def test_errors_name_the_kind_that_a_link_has_fallen_back_to(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[socket.socket] = []
    original = PeerLink.receive

    def receive(self: PeerLink, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
        if self.rank == 1 and not kept:
            kept.append(self.sock.dup())
        return original(self, max_fds)

    monkeypatch.setattr(PeerLink, "receive", receive)
    trouble("fail-registration", 100)
    with opened("auto", pair()) as (a, _), kept[0] as control:
        control.sendall(b"\0\0\x63")  # a note of no known kind
        error = until_failure(a)
    assert re.search(r"rank 1 \(pid \d+ on .*, tcp\) sent a note of kind 99", str(error)), error


@pytest.mark.parametrize("letter", ["x", "\u00e4", "\U0001f600", '"', "\udcff", " a\n"])
def test_a_fault_of_any_letters_fits_into_a_set_up_message(
    letter: str, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SetupError("no way: " + letter * 5000)

    monkeypatch.setattr(rdma, "_make", refuse)
    with opened("auto", pair()) as (a, b):
        links = [end.links()[0] for end in (a, b)]
    for link in links:
        assert link.kind == "tcp" and "[rdma: rank " in link.reason and "no way: " in link.reason
        assert len(link.reason) < 1000 and "\n" not in link.reason


@pytest.mark.parametrize("failed", ["\u00e4" * 2000, "  ", ["\n"] * 500, 7])
def test_what_a_peer_says_of_its_fault_fits_too(
    failed: object, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    original = PeerLink.send

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.rank == 0 and "rdma" in message:
            body = json.dumps({"failed": failed}, ensure_ascii=False).encode()
            self.sock.sendall(len(body).to_bytes(2, "little") + body)
        else:
            original(self, message, fds)

    monkeypatch.setattr(PeerLink, "send", send)
    with opened("auto", pair()) as (a, b):
        assert [end.links()[0].kind for end in (a, b)] == ["tcp", "tcp"]


def test_auto_uses_rdma_that_can_be_set_up(trouble: Trouble) -> None:
    with opened("auto", pair()) as (a, b):
        assert [end.links()[0].kind for end in (a, b)] == ["rdma", "rdma"]
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0


def test_gpudirect_that_was_asked_for_is_no_reason_to_fall_back() -> None:
    settings = {"gpudirect": "on", "setup_timeout": 5.0}
    with pytest.raises(TransportUnavailable, match="no GPU"), opened("auto", pair(), **settings):
        pass


def test_a_queue_pair_that_times_out_once_is_moved_again(trouble: Trouble) -> None:
    trouble("fail-connection", 2)
    with opened("rdma", pair()) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0


def test_queue_pairs_get_what_the_flags_say() -> None:
    wanted = {"traffic_class": 96, "service_level": 3, "pkey_index": 1, "timeout": 18, "retries": 5}
    with opened("rdma", pair(), rdma=RdmaOptions(devices="fake0:1", **wanted)) as (a, b):
        reason = a.links()[0].reason
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
    said = "GID index 2, traffic class 96, service level 3, partition key 1, time-out 18, retries 5"
    assert reason.endswith(f"; fake0 port 1, RoCE v2, {said}")


def test_a_card_that_does_not_tell_its_settings_has_a_link(trouble: Trouble) -> None:
    trouble("fail-query", 1)
    with opened("rdma", pair()) as (a, b):
        reasons = sorted(end.links()[0].reason for end in (a, b))
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
    assert reasons[0].endswith("retries 7")
    assert reasons[1].endswith("querying a queue pair of fake0: Invalid argument (errno 22)")


@pytest.mark.parametrize(("asked", "apart"), [("auto", False), ("off", False), ("on", True)])
def test_the_notice_of_large_data_goes_apart_where_packets_are_reordered(
    trouble: Trouble, asked: str, apart: bool
) -> None:
    trouble("reset", 0)
    options = RdmaOptions(adaptive_routing=asked)
    sizes = (0, 8000, 8193, 100_000, 5 * MIB)
    with opened("rdma", pair(5 * MIB), rdma=options) as (a, b):
        assert ("adaptive routing" in a.links()[0].reason) is apart
        for turn in range(20):
            sent = torch.full((sizes[turn % 5],), turn, dtype=torch.uint8)
            a.put(0, sent, iteration=0, microbatch=turn)
            assert torch.equal(take_next(b, 0, turn).tensor, sent)
        a.flush(PATIENCE)
    most = fake_verbs().fake_verbs_seen(b"most-with-immediate")
    assert (most < 8192 + 200) if apart else (most > MIB), most


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rdma_adaptive_routing": "yes"}, "--dpp-rdma-adaptive-routing yes: expected one of auto"),
        ({"rdma_traffic_class": 256}, "--dpp-rdma-traffic-class 256: must be from 0 to 255"),
        ({"rdma_timeout": 0}, "--dpp-rdma-timeout 0: must be from 1 to 31"),
        ({"rdma_retries": 8}, "--dpp-rdma-retries 8: must be from 0 to 7"),
        ({"rdma_service_level": -1}, "--dpp-rdma-service-level -1: must be from 0 to 15"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DppConfig(**changes)  # type: ignore[arg-type]


def test_gpudirect_without_a_gpu_is_refused_when_it_is_asked_for() -> None:
    settings = {"gpudirect": "on", "setup_timeout": 5.0}
    with (
        pytest.raises(TransportUnavailable, match=r"rank \d has no GPU of NVIDIA"),
        opened("rdma", pair(), **settings),
    ):
        pass
    with pytest.raises(ConfigError, match="gpudirect is yes; expected one of auto, on, off"):
        TransportOptions(gpudirect="yes")


def test_the_declarations_are_those_of_the_header() -> None:
    if shutil.which("g++") is None or not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no <infiniband/verbs.h> to compare with")
    source = str(REPOSITORY / "csrc/tests/verbs_abi.cc")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{REPOSITORY / 'csrc'}", source]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert compiled.returncode == 0, compiled.stderr


def port(device: str, *gids: tuple[int, str, str], **changes: object) -> dict[str, object]:
    facts = {"device": device, "port": 1, "active": True, "infiniband": False, "lid": 0}
    return {**facts, "addresses": list(gids), **changes}


MAPPED = "00000000000000000000ffff0a000005"  # 10.0.0.5
LOCAL = "fe800000000000000000000000000001"
ROUTABLE = "20010db8" + "0" * 24


def test_the_port_is_the_one_with_the_address_and_roce_v2() -> None:
    ports = [
        port("mlx5_0", (0, LOCAL, "RoCE v2")),
        port("mlx5_1", (0, LOCAL, "RoCE v1"), (2, MAPPED, "RoCE v1"), (3, MAPPED, "RoCE v2")),
    ]
    place, _ = choose_place(ports, "10.0.0.5")
    assert place is not None
    assert (place.device, place.gid_index, place.network) == ("mlx5_1", 3, "RoCE v2")
    six = port("mlx5_2", (0, LOCAL, "RoCE v2"), (5, ROUTABLE, "RoCE v1"), (6, ROUTABLE, "RoCE v2"))
    place, _ = choose_place([*ports, six], "2001:db8::")
    assert place is not None and (place.device, place.gid_index) == ("mlx5_2", 6)
    place, why = choose_place(ports, "10.0.0.6")
    assert place is None
    assert "no RDMA port has the address 10.0.0.6 (there are mlx5_0 port 1, mlx5_1 port 1)" in why
    _, why = choose_place([port("mlx5_1", (3, MAPPED, "RoCE v2"), active=False)], "10.0.0.5")
    assert "mlx5_1 port 1, which has 10.0.0.5, is not active" in why
    assert choose_place([], "10.0.0.5") == (None, "no RDMA device")


def test_a_device_that_cannot_be_opened_does_not_hide_the_others(trouble: Trouble) -> None:
    trouble("other-device", 1)
    with opened("rdma", pair()) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
    place, why = find_place(load_native(), "10.0.0.5", RdmaOptions(), torch.device("cpu"))
    assert place is None
    assert "no RDMA port has the address 10.0.0.5 (there are fake0 port 1; opening RDMA" in why
    assert "opening RDMA device fake1: Operation not permitted" in why
    assert choose_place([], "10.0.0.5", refused=[why]) == (None, why)


def test_infiniband_is_found_by_its_ip_interface() -> None:
    ports = [port("mlx5_2", (0, LOCAL, "InfiniBand"), infiniband=True, lid=7)]
    assert choose_place(ports, "10.0.0.5")[0] is None
    place, _ = choose_place(ports, "10.0.0.5", [("mlx5_2", 1)])
    assert place is not None and place.network == "InfiniBand"


ROOT = Path("/sys/devices")
SWITCH = ROOT / "pci0000:15/0000:15:01.0/0000:16:00.0"
GPU = SWITCH / "0000:17:00.0/0000:18:00.0"


def test_pci_distance_orders_as_nccl_does() -> None:
    below_one_switch = SWITCH / "0000:17:01.0/0000:19:00.0"
    below_one_port = ROOT / "pci0000:15/0000:15:01.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0"
    below_one_bridge = ROOT / "pci0000:15/0000:15:02.0/0000:20:00.0"
    further = ROOT / "pci0000:97/0000:97:01.0/0000:98:00.0"
    distances = [
        pci_distance(GPU, card)
        for card in (below_one_switch, below_one_port, below_one_bridge, further)
    ]
    assert distances == sorted(set(distances))
    assert [kind for kind, _ in distances] == [0, 0, 1, 2]
    assert pci_distance(GPU, further) == pci_distance(further, GPU)


def test_a_gpu_takes_the_nearest_named_port_and_ranks_share_equal_ones() -> None:
    ports = [port(f"mlx5_{i}", (0, LOCAL, "RoCE v1"), (3, MAPPED, "RoCE v2")) for i in range(3)]
    cards = {
        "mlx5_0": ROOT / "pci0000:97/0000:98:00.0",
        "mlx5_1": SWITCH / "0000:17:01.0/0000:19:00.0",
        "mlx5_2": SWITCH / "0000:17:02.0/0000:1a:00.0",
    }

    def chosen(devices: str, gpu: Path | None, local_rank: int) -> str:
        options = RdmaOptions(devices=devices)
        place, why = choose_named(ports, options, "10.0.0.5", gpu, cards, local_rank)
        return why if place is None else f"{place.device}:{place.gid_index}"

    assert [chosen("nearest", GPU, rank) for rank in range(3)] == [
        "mlx5_1:3",
        "mlx5_2:3",
        "mlx5_1:3",
    ]
    assert [chosen("mlx5_0,mlx5_2:1", None, rank) for rank in range(2)] == ["mlx5_0:3", "mlx5_2:3"]
    assert chosen("mlx5_0,mlx5_2:1", GPU, 0) == "mlx5_2:3"
    missing = chosen("mlx5_2:2,mlx5_9", GPU, 0)
    assert missing.startswith(
        "--dpp-rdma-devices mlx5_2:2,mlx5_9: no such active port (there are mlx5_0"
    )


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(0, LOCAL, "RoCE v2"), (1, "20010db8" + "0" * 24, "RoCE v2")], 1),
        ([(0, LOCAL, "RoCE v1"), (1, LOCAL, "RoCE v2")], 1),
        ([(2, MAPPED[:-2] + "09", "RoCE v2"), (3, MAPPED, "RoCE v2"), (4, MAPPED, "RoCE v1")], 3),
    ],
)
def test_the_best_address_of_a_port(gids: list[tuple[int, str, str]], index: int) -> None:
    named = RdmaOptions(devices="mlx5_0")
    place, _ = choose_named([port("mlx5_0", *gids)], named, "10.0.0.5", None, {}, 0)
    assert place is not None and place.gid_index == index


def test_the_address_of_a_port_is_of_the_hosts_family() -> None:
    both = [(0, LOCAL, "RoCE v2"), (1, MAPPED, "RoCE v2"), (2, ROUTABLE, "RoCE v2")]
    for address, index in (("10.0.0.9", 1), ("2001:db8::9", 2)):
        named = RdmaOptions(devices="mlx5_0")
        place, _ = choose_named([port("mlx5_0", *both)], named, address, None, {}, 0)
        assert place is not None and place.gid_index == index


def test_an_index_that_the_port_lacks_is_refused() -> None:
    ports = [port("mlx5_0", (0, LOCAL, "RoCE v1"), (3, MAPPED, "RoCE v2"))]
    for index in (0, 7):
        options = RdmaOptions(devices="mlx5_0", gid_index=index)
        place, why = choose_named(ports, options, "10.0.0.5", None, {}, 0)
        assert place is None and f"no RoCE v2 address with index {index}" in why
        assert "--dpp-rdma-gid-index" in why


def test_an_infiniband_port_needs_no_ip_address() -> None:
    ports = [port("mlx5_2", (0, LOCAL, "InfiniBand"), infiniband=True, lid=7)]
    place, _ = choose_named(ports, RdmaOptions(devices="mlx5_2"), "10.0.0.5", None, {}, 0)
    assert place is not None and place.network == "InfiniBand"


def facts(rank: int, network: str, missing: str = "") -> Facts:
    place = {"device": "", "port": 1, "gid_index": 0, "infiniband": network == "InfiniBand"}
    found = {"missing": missing} if missing else {"place": place}
    return Facts(
        rank=rank, abi=1, host=f"h{rank}", hostname=f"node{rank}", uid=0, pid=1, device="cpu",
        unix_address="", tcp_address=("10.0.0.1", 1), settings={}, found={"rdma": found},
    )  # fmt: skip


def test_hosts_with_rdma_use_it_and_others_say_why_not() -> None:
    assert choose(facts(0, "RoCE v2"), facts(1, "RoCE v2"), kinds_of_links()).kind.name == "rdma"
    choice = choose(facts(0, "RoCE v2"), facts(1, "", "no RDMA device"), kinds_of_links())
    assert choice.kind.name == "tcp"
    assert "rdma: rank 1 on node1: no RDMA device" in choice.reason
    with pytest.raises(TransportUnavailable, match="rank 0 is on RoCE v2, rank 1 on InfiniBand"):
        choose(facts(0, "RoCE v2"), facts(1, "InfiniBand"), kinds_of_links("rdma"), "rdma")
