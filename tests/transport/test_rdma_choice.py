"""The choice of a rank's RDMA ports, of their addresses, and of the two ends of a link."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.dpp.transport.choose import choose
from megatron.dpp.transport.pci import pci_distance

from megatron.dpp.errors import TransportUnavailable
from megatron.dpp.hosts import addresses
from megatron.dpp.transport import rdma_ports
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.kinds import kinds_of_links
from megatron.dpp.transport.options import RdmaOptions, TransportOptions
from megatron.dpp.transport.rdma_ports import (
    Node,
    Place,
    choose_place,
    choose_places,
    read_places,
    ways,
)


def chosen(
    ports: Sequence[Any], address: str = "10.0.0.5", node: Node | None = None, **options: Any
) -> tuple[Place | None, str]:
    """The first port of a rank whose node has an address, or the reason why there is none."""
    settings = RdmaOptions(**options)
    places, why = choose_places(ports, settings, address, node or Node(), "node")
    return (places[0], "") if places else (None, why)


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
    place, _ = choose_place(ports, "10.0.0.5", Node())
    assert place is not None
    assert (place.device, place.gid_index, place.network) == ("mlx5_1", 3, "RoCE v2")
    six = port("mlx5_2", (0, LOCAL, "RoCE v2"), (5, ROUTABLE, "RoCE v1"), (6, ROUTABLE, "RoCE v2"))
    place, _ = choose_place([*ports, six], "2001:db8::", Node())
    assert place is not None and (place.device, place.gid_index) == ("mlx5_2", 6)
    place, why = choose_place(ports, "10.0.0.6", Node())
    assert place is None
    assert "no RDMA port has the address 10.0.0.6 (there are mlx5_0 port 1, mlx5_1 port 1)" in why
    _, why = choose_place(
        [port("mlx5_1", (3, MAPPED, "RoCE v2"), active=False)], "10.0.0.5", Node()
    )
    assert "mlx5_1 port 1, which has 10.0.0.5, is not active" in why
    assert choose_place([], "10.0.0.5", Node()) == (None, "no RDMA device")


def test_infiniband_is_found_by_its_ip_interface() -> None:
    ports = [port("mlx5_2", (0, LOCAL, "InfiniBand"), infiniband=True, lid=7)]
    assert choose_place(ports, "10.0.0.5", Node())[0] is None
    place, _ = choose_place(ports, "10.0.0.5", Node(infiniband=[("mlx5_2", 1)]))
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


def ports_of(count: int) -> list[dict[str, object]]:
    """RoCE ports with the addresses 10.0.0.5, 10.0.1.5 and so on."""
    gids = [f"{MAPPED[:-8]}0a00{number:02x}05" for number in range(count)]
    return [
        port(f"mlx5_{number}", (0, LOCAL, "RoCE v1"), (3, gid, "RoCE v2"))
        for number, gid in enumerate(gids)
    ]


def node_of(gpus: Sequence[Path | None], local_rank: int, cards: Sequence[Path]) -> Node:
    """The node as a rank sees it, whose ranks have these GPUs."""
    paths = {f"mlx5_{number}": path for number, path in enumerate(cards)}
    return Node(gpus=gpus[: local_rank + 1], cards=paths)


def taken(
    gpus: Sequence[Path | None], cards: Sequence[Path], *, address_of: str = "node", **options: Any
) -> list[str]:
    """The devices that the ranks of a node take."""
    found = []
    for rank in range(len(gpus)):
        node = node_of(gpus, rank, cards)
        settings = RdmaOptions(**options)
        places, _ = choose_places(ports_of(len(cards)), settings, "10.0.0.5", node, address_of)
        found.append(places[0].device)
    return found


def below(switch: int, place: int) -> Path:
    """A device below one of a node's PCI switches, each at a host bridge of its own."""
    return ROOT / f"pci0000:{switch}0/0000:{switch}0:01.0/0000:{switch}1:{place:02}.0"


CARDS_OF_TWO_SWITCHES = [below(switch, place) for switch in (1, 2) for place in (8, 9)]


def test_each_gpu_takes_a_card_of_its_own_that_is_nearest_to_it() -> None:
    """Eight GPUs and eight cards, two and two below a switch, and not in one order."""
    gpus = [below(switch, place) for switch in (3, 1, 4, 2) for place in (1, 2)]
    cards = [below(switch, place) for switch in (1, 2, 3, 4) for place in (8, 9)]
    expected = [f"mlx5_{number}" for number in (4, 5, 0, 1, 6, 7, 2, 3)]
    for address_of, options in (("route", {}), ("node", {}), ("rank", {"devices": "nearest"})):
        assert taken(gpus, cards, address_of=address_of, **options) == expected
    assert taken(gpus, cards, address_of="rank") == ["mlx5_0"] * 8


def test_ranks_that_share_cards_take_turns_whatever_their_numbers_are() -> None:
    gpus = [below(switch, 1 + place) for place in range(2) for switch in (1, 2)]
    assert taken(gpus, CARDS_OF_TWO_SWITCHES) == ["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]
    # A third rank of a switch begins again; ranks without a GPU share all named ports.
    assert taken([below(1, place) for place in (1, 2, 3)], CARDS_OF_TWO_SWITCHES) == [
        "mlx5_0", "mlx5_1", "mlx5_0",
    ]  # fmt: skip
    named = {"devices": "mlx5_1,mlx5_3"}
    assert taken([None] * 3, CARDS_OF_TWO_SWITCHES, **named) == ["mlx5_1", "mlx5_3", "mlx5_1"]
    assert taken([below(2, 1)] * 2, CARDS_OF_TWO_SWITCHES, **named) == ["mlx5_3", "mlx5_3"]


def test_without_a_gpu_or_with_one_card_the_address_decides() -> None:
    assert taken([None] * 3, CARDS_OF_TWO_SWITCHES) == ["mlx5_0"] * 3
    assert taken([below(2, 1)] * 2, CARDS_OF_TWO_SWITCHES[:1]) == ["mlx5_0"] * 2
    gpu = node_of([below(2, 1)], 0, CARDS_OF_TWO_SWITCHES)
    place, why = chosen(ports_of(1), "10.9.9.9", gpu)
    assert place is None and "no RDMA port has the address 10.9.9.9" in why
    place, _ = chosen(ports_of(4), "10.9.9.9", gpu)
    assert place is not None and (place.device, place.gid_index) == ("mlx5_2", 3)


def test_a_gpu_passes_over_ports_that_reach_nobody() -> None:
    ports = ports_of(4)
    ports[2]["active"] = False
    ports[3]["addresses"] = [(0, LOCAL, "RoCE v2"), (1, MAPPED, "RoCE v1")]
    node = node_of([below(2, 1)], 0, CARDS_OF_TWO_SWITCHES)
    places, _ = choose_places(ports, RdmaOptions(), "10.0.0.5", node, "node")
    assert [(place.device, place.distance) for place in places] == [("mlx5_0", 2), ("mlx5_1", 2)]
    place, _ = chosen(ports, node=node, devices="mlx5_3")
    assert place is not None and (place.device, place.distance) == ("mlx5_3", 0)


def test_an_address_that_the_user_names_says_which_network_is_meant() -> None:
    ports = ports_of(4)
    for number in (2, 3):
        ports[number] = port(f"mlx5_{number}", (0, LOCAL, "InfiniBand"), infiniband=True)
    node = node_of([below(2, 1)], 0, CARDS_OF_TWO_SWITCHES)
    found = {}
    for address_of in ("route", "node", "rank"):
        places, _ = choose_places(ports, RdmaOptions(), "10.0.0.5", node, address_of)
        found[address_of] = [place.device for place in places]
    assert found == {
        "route": ["mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1"],
        "node": ["mlx5_0", "mlx5_1"],
        "rank": ["mlx5_0"],
    }


def test_infiniband_is_used_without_any_ip_address() -> None:
    ports = [port("mlx5_2", (0, LOCAL, "InfiniBand"), infiniband=True, lid=7)]
    for gpu in (None, GPU):
        node = Node(gpus=[gpu], cards={"mlx5_2": below(1, 8)})
        place, why = chosen(ports, node=node)
        assert place is not None and place.network == "InfiniBand", why
        assert place.subnet == LOCAL[:8] + LOCAL[12:16]
    assert choose_places(ports, RdmaOptions(), "10.0.0.5", Node(), "rank")[0] == []


def test_ports_that_are_not_there_are_named() -> None:
    missing = chosen(ports_of(3), devices="mlx5_2:2,mlx5_9")[1]
    assert missing.startswith(
        "DppConfig(rdma_devices='mlx5_2:2,mlx5_9'): no such active port (there are mlx5_0"
    )
    place, _ = chosen(ports_of(3), devices="mlx5_9,mlx5_2:1")
    assert place is not None and place.device == "mlx5_2"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(0, LOCAL, "RoCE v2"), (1, "20010db8" + "0" * 24, "RoCE v2")], 1),
        ([(0, LOCAL, "RoCE v1"), (1, LOCAL, "RoCE v2")], 1),
        ([(2, MAPPED[:-2] + "09", "RoCE v2"), (3, MAPPED, "RoCE v2"), (4, MAPPED, "RoCE v1")], 3),
    ],
)
def test_the_best_address_of_a_port(gids: list[tuple[int, str, str]], index: int) -> None:
    place, _ = chosen([port("mlx5_0", *gids)], devices="mlx5_0")
    assert place is not None and place.gid_index == index


def test_the_address_of_a_port_is_of_the_hosts_family() -> None:
    both = [(0, LOCAL, "RoCE v2"), (1, MAPPED, "RoCE v2"), (2, ROUTABLE, "RoCE v2")]
    for address, index in (("10.0.0.9", 1), ("2001:db8::9", 2)):
        place, _ = chosen([port("mlx5_0", *both)], address, devices="mlx5_0")
        assert place is not None and place.gid_index == index
    place, _ = chosen([port("mlx5_0", *both[:2])], "2001:db8::9", devices="mlx5_0")
    assert place is not None and place.gid_index == 1, "one of the wire alone is of no use"


def test_an_index_that_the_port_lacks_is_refused() -> None:
    ports = [port("mlx5_0", (0, LOCAL, "RoCE v1"), (3, MAPPED, "RoCE v2"))]
    for index in (0, 7):
        place, why = chosen(ports, devices="mlx5_0", gid_index=index)
        assert place is None and f"no RoCE v2 address with index {index}" in why
        assert "rdma_gid_index" in why


def test_an_infiniband_port_needs_no_ip_address() -> None:
    ports = [port("mlx5_2", (0, LOCAL, "InfiniBand"), infiniband=True, lid=7)]
    place, _ = chosen(ports, devices="mlx5_2")
    assert place is not None and place.network == "InfiniBand"


def facts(rank: int, network: str, missing: str = "") -> Facts:
    place = {"device": "", "port": 1, "gid_index": 0, "infiniband": network == "InfiniBand"}
    found = {"missing": missing} if missing else {"places": [place]}
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


FLID = "fe8000001234000" + "0" * 16 + "1"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(0, LOCAL, "InfiniBand")], 0),
        ([(2, LOCAL, "InfiniBand"), (3, MAPPED, "InfiniBand")], 2),  # the table begins with a gap
        ([(0, LOCAL, "InfiniBand"), (1, FLID, "InfiniBand")], 1),
    ],
)
def test_the_address_of_an_infiniband_port_is_found_by_one_rule(
    gids: list[tuple[int, str, str]], index: int
) -> None:
    ports = [port("mlx5_2", *gids, infiniband=True, lid=7)]
    named, _ = chosen(ports, devices="mlx5_2")
    found, _ = choose_place(ports, "10.0.0.5", Node(infiniband=[("mlx5_2", 1)]))
    assert named is not None and found is not None
    assert (named.gid_index, found.gid_index) == (index, index)


# The two ends of a link --------------------------------------------------------------------------


def end(device: str, distance: int = 0, subnet: str = "", **more: Any) -> Place:
    place = Place(device, 1, 3, infiniband=False, subnet=subnet, distance=distance)
    return dataclasses.replace(place, **more)


def names(one: Sequence[Place], other: Sequence[Place]) -> list[tuple[str, str]]:
    return [(a.device, b.device) for a, b in ways(one, other)]


def test_a_link_uses_the_nearest_ports_of_both_ends() -> None:
    one = [end("a0", 0, "10.0.0.0/16"), end("a1", 2, "10.0.0.0/16")]
    other = [end("b1", 1, "10.0.0.0/16"), end("b0", 2, "10.0.0.0/16")]
    assert names(one, other) == [("a0", "b1")]
    assert names(one, []) == []
    assert names([end("a0", subnet="n")], [end("b0", subnet="n", infiniband=True)]) == []
    assert names([end("a0"), end("a6", 2, ipv6=True)], [end("b6", ipv6=True)]) == [("a6", "b6")]


def test_of_ports_as_near_those_in_one_subnet_are_used() -> None:
    one = [end("a0", 1, "rail 0"), end("a1", 1, "rail 1")]
    other = [end("b1", 1, "rail 1"), end("b0", 1, "rail 0")]
    assert names(one, other) == [("a0", "b0")]


@pytest.mark.parametrize("change", [{"distance": "1"}, {"infiniband": 1}, {"subnet": None}])
def test_ports_of_a_peer_have_fields_of_their_types(change: dict[str, Any]) -> None:
    good = dataclasses.asdict(end("mlx5_0"))
    assert read_places([good]) == [end("mlx5_0")]
    with pytest.raises(TypeError, match=next(iter(change))):
        read_places([{**good, **change}])


# GPUs ---------------------------------------------------------------------------------------------


def test_addresses_of_this_host_have_their_subnets() -> None:
    gids = {
        one: ("::ffff:" if ipaddress.ip_address(one).version == 4 else "") + one
        for one in {*addresses(), "127.0.0.1"}
    }
    for address, gid in gids.items():
        ports = [port("mlx5_0", (0, ipaddress.IPv6Address(gid).packed.hex(), "RoCE v2"))]
        library = SimpleNamespace(rdma_ports=lambda ports=ports: (ports, []))
        options = TransportOptions(address_of="rank")
        (place,), _ = rdma_ports.find_places(library, address, options, torch.device("cpu"))
        assert ipaddress.ip_address(address) in ipaddress.ip_network(place.subnet)
        assert address != "127.0.0.1" or place.subnet == "127.0.0.0/8"
