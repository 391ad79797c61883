"""The RDMA ports that a rank takes, and the address of each."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.hosts import addresses
from megatron.dpp.transport import (
    TransportOptions,
    rdma_ports,
)
from megatron.dpp.transport.options import RdmaOptions
from megatron.dpp.transport.rdma_ports import (
    Node,
    Place,
    choose_place,
    choose_places,
    pci_distance,
    read_places,
    way,
)

MAPPED = "00000000000000000000ffff0a000005"  # 10.0.0.5
LOCAL = "fe800000000000000000000000000001"
ROUTABLE = "20010db8" + "0" * 24
FLID = "fe8000001234000" + "0" * 16 + "1"
TWO, ONE, IB = "RoCE v2", "RoCE v1", "InfiniBand"


def port(device: str, *gids: tuple[int, str, str], **changes: Any) -> dict[str, Any]:
    made = {"device": device, "port": 1, "active": True, "infiniband": False}
    return {**made, "addresses": list(gids), **changes}


IB_PORT = port("mlx5_2", (0, LOCAL, IB), infiniband=True)
THREE = [
    port("mlx5_0", (0, LOCAL, TWO)),
    port("mlx5_1", (0, LOCAL, ONE), (2, MAPPED, ONE), (3, MAPPED, TWO)),
    port("mlx5_2", (0, LOCAL, TWO), (5, ROUTABLE, ONE), (6, ROUTABLE, TWO)),
]
BEHIND = Node(infiniband=[("mlx5_2", 1)])
Found = tuple[str, int] | str


@pytest.mark.parametrize(
    ("ports", "address", "node", "asked", "found"),
    [
        (THREE, "10.0.0.5", Node(), -1, ("mlx5_1", 3)),
        (THREE, "2001:db8::", Node(), -1, ("mlx5_2", 6)),
        (THREE[:2], "10.0.0.6", Node(),
         -1, "no RDMA port has the address 10.0.0.6 (there are mlx5_0 port 1, mlx5_1 port 1)"),
        ([port("mlx5_1", (3, MAPPED, TWO), active=False)], "10.0.0.5", Node(),
         -1, "mlx5_1 port 1, which has 10.0.0.5, is not active"),
        ([], "10.0.0.5", Node(), -1, "no RDMA device"),
        ([], "10.0.0.5", Node(refused=["not permitted"]), -1, "not permitted"),
        ([IB_PORT], "10.0.0.5", Node(), -1, "no RDMA port has the address"),
        ([IB_PORT], "10.0.0.5", BEHIND, -1, ("mlx5_2", 0)),
        ([{**IB_PORT, "addresses": []}], "10.0.0.5", BEHIND, -1, "no RDMA port has the address"),
        ([port("p", (0, ROUTABLE, TWO), (3, MAPPED, TWO))], "10.0.0.5", Node(), 0, ("p", 0)),
        ([port("p", (0, LOCAL, ONE), (3, MAPPED, TWO))], "10.0.0.5", Node(),
         0, "p port 1 has no RoCE v2 address with index 0; there are 0 (RoCE v1), 3 (RoCE v2) "
            "(DPP_RDMA_GID_INDEX)"),
        # InfiniBand: the first address, but one with a LID for routers before it.
        ([{**IB_PORT, "addresses": [(2, LOCAL, IB), (3, MAPPED, IB)]}], "10.0.0.5", BEHIND,
         -1, ("mlx5_2", 2)),
        ([{**IB_PORT, "addresses": [(0, LOCAL, IB), (1, FLID, IB)]}], "10.0.0.5", BEHIND,
         -1, ("mlx5_2", 1)),
    ],
)  # fmt: skip
def test_the_port_with_an_address(
    ports: Any, address: str, node: Node, asked: int, found: Found
) -> None:
    place, why = choose_place(ports, address, node, gid_index=asked)
    if isinstance(found, str):
        assert place is None and why.startswith(found), why
    else:
        assert place is not None and (place.device, place.gid_index) == found


@pytest.mark.parametrize(
    ("gids", "address", "index"),
    [
        ([(0, LOCAL, TWO), (1, ROUTABLE, TWO)], "10.0.0.5", 1),
        ([(0, LOCAL, ONE), (1, LOCAL, TWO)], "10.0.0.5", 1),
        ([(2, MAPPED[:-2] + "09", TWO), (3, MAPPED, TWO), (4, MAPPED, ONE)], "10.0.0.5", 3),
        ([(0, LOCAL, TWO), (1, MAPPED, TWO), (2, ROUTABLE, TWO)], "10.0.0.9", 1),
        ([(0, LOCAL, TWO), (1, MAPPED, TWO), (2, ROUTABLE, TWO)], "2001:db8::9", 2),
        ([(0, LOCAL, TWO), (1, MAPPED, TWO)], "2001:db8::9", 1),
    ],
)
def test_the_best_address_of_a_named_port(gids: Any, address: str, index: int) -> None:
    options = RdmaOptions(devices="mlx5_0")
    places, _ = choose_places([port("mlx5_0", *gids)], options, address, Node(), "node")
    assert [place.gid_index for place in places] == [index]


# The nearest port ---------------------------------------------------------------------------------

ROOT = Path("/sys/devices")
SWITCH = ROOT / "pci0000:15/0000:15:01.0/0000:16:00.0"
GPU = SWITCH / "0000:17:00.0/0000:18:00.0"


def test_pci_distance_orders_as_nccl_does() -> None:
    cards = (
        SWITCH / "0000:17:01.0/0000:19:00.0",  # below one switch
        ROOT / "pci0000:15/0000:15:01.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0",  # one port
        ROOT / "pci0000:15/0000:15:02.0/0000:20:00.0",  # one bridge
        ROOT / "pci0000:97/0000:97:01.0/0000:98:00.0",
    )
    distances = [pci_distance(GPU, card) for card in cards]
    assert distances == sorted(set(distances))
    assert [kind for kind, _ in distances] == [0, 0, 1, 2]
    assert pci_distance(GPU, cards[3]) == pci_distance(cards[3], GPU)


def below(switch: int, place: int) -> Path:
    """A device below one of a node's PCI switches, each at a host bridge of its own."""
    return ROOT / f"pci0000:{switch}0/0000:{switch}0:01.0/0000:{switch}1:{place:02}.0"


def ports_of(count: int) -> list[dict[str, Any]]:
    """RoCE ports with the addresses 10.0.0.5, 10.0.1.5 and so on."""
    gids = [f"{MAPPED[:-8]}0a00{number:02x}05" for number in range(count)]
    return [port(f"mlx5_{n}", (0, LOCAL, ONE), (3, gid, TWO)) for n, gid in enumerate(gids)]


def node_of(gpu: Path | None, turn: int, cards: Sequence[Path]) -> Node:
    return Node(
        gpu=gpu, turn=turn, cards={f"mlx5_{number}": path for number, path in enumerate(cards)}
    )


def taken(
    gpus: Sequence[Path | None], cards: Sequence[Path], *, address_of: str = "node", **options: Any
) -> list[str]:
    """The devices that the ranks of a node take."""
    found = []
    for rank, gpu in enumerate(gpus):
        node, settings = node_of(gpu, rank, cards), RdmaOptions(**options)
        places, _ = choose_places(ports_of(len(cards)), settings, "10.0.0.5", node, address_of)
        found.append(places[0].device)
    return found


CARDS = [below(switch, place) for switch in (1, 2) for place in (8, 9)]
"""Two and two below a switch."""


def test_each_gpu_takes_a_card_that_is_nearest_to_it_and_ranks_take_turns() -> None:
    """Eight GPUs and eight cards, two and two below a switch, and not in one order."""
    gpus = [below(switch, place) for switch in (3, 1, 4, 2) for place in (1, 2)]
    cards = [below(switch, place) for switch in (1, 2, 3, 4) for place in (8, 9)]
    expected = [f"mlx5_{number}" for number in (4, 5, 0, 1, 6, 7, 2, 3)]
    for address_of, options in (("route", {}), ("node", {}), ("rank", {"devices": "nearest"})):
        assert taken(gpus, cards, address_of=address_of, **options) == expected
    assert taken(gpus, cards, address_of="rank") == ["mlx5_0"] * 8
    assert taken([below(1, n) for n in (1, 2, 3)], CARDS) == ["mlx5_0", "mlx5_1", "mlx5_0"]
    named = {"devices": "mlx5_1,mlx5_3"}
    assert taken([None] * 3, CARDS, **named) == ["mlx5_1", "mlx5_3", "mlx5_1"]
    assert taken([below(2, 1)] * 2, CARDS, **named) == ["mlx5_3", "mlx5_3"]
    # Without a GPU, or with one card, the address decides.
    assert taken([None] * 3, CARDS) == ["mlx5_0"] * 3
    assert taken([below(2, 1)] * 2, CARDS[:1]) == ["mlx5_0"] * 2


DOWN = ports_of(4)
DOWN[2] |= {"active": False}
DOWN[3] |= {"addresses": [(0, LOCAL, TWO), (1, MAPPED, ONE)]}
MIXED = [*ports_of(2), *(port(f"mlx5_{n}", (0, LOCAL, IB), infiniband=True) for n in (2, 3))]
NEAR_2 = node_of(below(2, 1), 0, CARDS)


@pytest.mark.parametrize(
    ("ports", "address", "node", "address_of", "options", "found"),
    [
        (ports_of(4), "10.9.9.9", NEAR_2, "node", {}, ["mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1"]),
        (ports_of(1), "10.9.9.9", NEAR_2, "node", {}, "no RDMA port has the address 10.9.9.9"),
        # A GPU passes over ports that reach nobody, unless they are named.
        (DOWN, "10.0.0.5", NEAR_2, "node", {}, ["mlx5_0", "mlx5_1"]),
        (DOWN, "10.0.0.5", NEAR_2, "node", {"devices": "mlx5_3"}, ["mlx5_3"]),
        (DOWN, "10.0.0.5", NEAR_2, "node", {"devices": "mlx5_2"},
         "DPP_RDMA_DEVICES=mlx5_2: no such active port (there are mlx5_0 port 1, mlx5_1 port 1, "
         "mlx5_2 port 1 (not active), mlx5_3 port 1)"),
        # An address that the user names says which network is meant.
        (MIXED, "10.0.0.5", NEAR_2, "route", {}, ["mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1"]),
        (MIXED, "10.0.0.5", NEAR_2, "node", {}, ["mlx5_0", "mlx5_1"]),
        (MIXED, "10.0.0.5", NEAR_2, "rank", {}, ["mlx5_0"]),
        # InfiniBand is used without any IP address.
        ([IB_PORT], "10.0.0.5", Node(), "node", {}, ["mlx5_2"]),
        ([IB_PORT], "10.0.0.5", NEAR_2, "node", {}, ["mlx5_2"]),
        ([IB_PORT], "10.0.0.5", Node(), "rank", {}, "no RDMA port has the address"),
        (ports_of(3), "10.0.0.5", Node(), "node", {"devices": "mlx5_9,mlx5_2:1"}, ["mlx5_2"]),
        (ports_of(3), "10.0.0.5", Node(), "node", {"devices": "mlx5_2:2,mlx5_9"},
         "DPP_RDMA_DEVICES=mlx5_2:2,mlx5_9: no such active port (there are mlx5_0 port 1"),
        ([port("mlx5_0")], "10.0.0.5", Node(), "node", {"devices": "mlx5_0"},
         "DPP_RDMA_DEVICES=mlx5_0: no such active port (there are mlx5_0 port 1)"),
    ],
)  # fmt: skip
def test_the_ports_of_a_rank(
    ports: Any, address: str, node: Node, address_of: str, options: Any, found: list[str] | str
) -> None:
    places, why = choose_places(ports, RdmaOptions(**options), address, node, address_of)
    if isinstance(found, str):
        assert places == [] and why.startswith(found), why
    else:
        assert [place.device for place in places] == found


def end(device: str, distance: int = 0, subnet: str = "", **more: Any) -> Place:
    return Place(
        device, 1, 3, **{"infiniband": False, "subnet": subnet, "distance": distance, **more}
    )


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([end("a0", 0, "n"), end("a1", 2, "n")], [end("b1", 1, "n"), end("b0", 2, "n")], "a0 b1"),
        ([end("a0")], [], None),
        ([end("a0", subnet="n")], [end("b0", subnet="n", infiniband=True)], None),
        ([end("a0"), end("a6", 2, ipv6=True)], [end("b6", ipv6=True)], "a6 b6"),
        # Of ports as near, those in one subnet; an unknown subnet is none.
        ([end("a0", 1, "rail 0"), end("a1", 1, "rail 1")],
         [end("b1", 1, "rail 1"), end("b0", 1, "rail 0")], "a0 b0"),
        ([end("a0", 1), end("a1", 1, "r")], [end("b0", 1), end("b1", 1, "r")], "a1 b1"),
        ([end("a4", 0, "r4"), end("a0", 2, "r0")], [end("b0", 0, "r0"), end("b4", 2, "r4")],
         "a4 b0"),
    ],
)  # fmt: skip
def test_a_link_uses_the_nearest_ports_of_both_ends(one: Any, other: Any, found: Any) -> None:
    pair = way(one, other)
    assert (" ".join(place.device for place in pair) if pair else None) == found


@pytest.mark.parametrize("change", [{"distance": "1"}, {"infiniband": 1}, {"subnet": None}])
def test_ports_of_a_peer_have_fields_of_their_types(change: dict[str, Any]) -> None:
    good = dataclasses.asdict(end("mlx5_0"))
    assert read_places([good]) == [end("mlx5_0")]
    with pytest.raises(TypeError, match=next(iter(change))):
        read_places([{**good, **change}])


# This machine -------------------------------------------------------------------------------------


def looked(ports: Any, address: str | None) -> tuple[list[Place], str]:
    library = SimpleNamespace(rdma_ports=lambda: (ports, []))
    options = TransportOptions(address_of="rank")
    return rdma_ports.find_places(library, address, options, torch.device("cpu"))


@pytest.mark.parametrize(("interface", "port"), [("ib0", 1), ("ib1", 2), ("ib2", 1), ("eth0", 0)])
def test_an_interface_names_its_infiniband_port(
    interface: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_ports, "Path", lambda _: tmp_path)
    monkeypatch.setattr(rdma_ports, "networks", lambda: {"10.0.0.5": (interface, "10.0.0.0/24")})
    for name in ("ib0", "ib1", "ib2"):
        (tmp_path / name / "device" / "infiniband" / "mlx5_2").mkdir(parents=True)
    (tmp_path / "eth0").mkdir()
    (tmp_path / "ib1" / "dev_port").write_text("1\n")
    (tmp_path / "ib2" / "dev_port").write_text("no number")
    places, _ = looked([{**IB_PORT, "port": number} for number in (2, 1)], "10.0.0.5")
    assert [place.port for place in places] == ([port] if port else [])
    places, why = looked([], None)
    assert places == [] and "node_ips" in why


def test_a_gpu_is_found_by_its_address_in_hexadecimal(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0x0C)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    path = rdma_ports.gpu_path(torch.device("cuda", 0))
    assert path is not None and path.name == "0001:1b:0c.0"
    assert rdma_ports.gpu_path(torch.device("cpu")) is None
    del known.pci_bus_id
    assert rdma_ports.gpu_path(torch.device("cuda", 0)) is None, "an older PyTorch"


def test_addresses_of_this_host_have_their_subnets() -> None:
    for address in {*addresses(), "127.0.0.1"}:
        mapped = ("::ffff:" if ":" not in address else "") + address
        gid = ipaddress.IPv6Address(mapped).packed.hex()
        (place,), _ = looked([port("mlx5_0", (0, gid, TWO))], address)
        assert ipaddress.ip_address(address) in ipaddress.ip_network(place.subnet)
        assert address != "127.0.0.1" or place.subnet == "127.0.0.0/8"
