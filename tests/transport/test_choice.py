"""The kind that a link gets, the RDMA ports that a rank takes, and the numbers that are refused."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, SetupError, TransportUnavailable
from megatron.dpp.hosts import addresses
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    TransportOptions,
    open_transport,
    rdma_ports,
)
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.kinds import (
    TransportKind,
    cuda_ipc,
    kinds_of_links,
    shm,
    staged,
    tcp,
)
from megatron.dpp.transport.open import choose
from megatron.dpp.transport.options import RdmaOptions, variable
from megatron.dpp.transport.rdma_ports import (
    Node,
    Place,
    choose_place,
    choose_places,
    pci_distance,
    read_places,
    way,
)
from tests.transport.kinds import Library, opened
from tests.transport.meeting import facts


def kind(name: str, against: str | None = None, **capabilities: Any) -> TransportKind:
    return TransportKind(
        name=name, reason=f"{name} fits", obstacle=lambda one, other: against, **capabilities
    )


# A pair of ranks ----------------------------------------------------------------------------------


def test_both_ranks_ask_a_kind_in_one_order() -> None:
    asked: list[tuple[int, int]] = []
    asks = dataclasses.replace(
        kind("asks"), obstacle=lambda one, other: asked.append((one.rank, other.rank))
    )
    for own, peer in ((3, 10), (10, 3)):
        choose(facts(own), facts(peer), [asks])
    assert asked == [(3, 10)] * 2


@pytest.mark.parametrize(
    ("changes", "in_place", "noted"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"device": "cpu", "gpu": ""}, False, False),
        ({"gpu": ""}, True, True),
        ({"device": "cpu"}, True, False),
    ],
)
def test_the_reason_says_when_gpu_tensors_pass_through_the_host(
    changes: dict[str, Any], in_place: bool, noted: bool
) -> None:
    own = facts(0, **changes) if changes.get("device") == "cpu" else facts(0)
    choice = choose(own, facts(1, **changes), [kind("one", device_memory=in_place)])
    note = "; CUDA tensors pass through the host's memory" if noted else ""
    assert choice.reason == f"one fits{note}"


def test_the_choice_says_why_better_kinds_are_not_possible_and_what_is_next() -> None:
    local, here = kind("local", "far"), kind("here", device_memory=True)
    fast = kind("fast", "no card", between_hosts=True)
    slow = kind("slow", between_hosts=True, device_memory=True)
    pair = facts(0), facts(1)
    assert choose(*pair, [local, fast, slow]).reason == "slow fits [fast: no card]"
    assert choose(*pair, [local, slow]).reason == "slow fits"
    assert choose(*pair, [fast, here]).reason == "here fits", "only a link between hosts"
    may_fail = kind("may-fail", may_fail=True, connections=lambda options: ("a",))
    after = kind("next", connections=lambda options: ("b", "c"))
    kinds = [may_fail, kind("never", "no"), after, here]
    choice = choose(*pair, kinds)
    assert choice.instead is not None and choice.instead.kind is after
    assert choice.instead.instead is None
    assert choice.connections(TransportOptions()) == ("a", "b", "c")
    asked_for = choose(*pair, kinds, "may-fail")
    assert asked_for.instead is None and asked_for.reason.startswith("asked for: may-fail")
    text = r"transport='auto'\) between rank 0 \(node0\) and rank 4 \(node4\): one: no; two:"
    with pytest.raises(TransportUnavailable, match=text):
        choose(facts(4), facts(0), [kind("one", "no"), kind("two", "too old")])
    with pytest.raises(TransportUnavailable, match="it links no ranks"):
        choose(facts(4), facts(0), [])


def test_what_stands_against_a_kind() -> None:
    for module in (shm, staged, cuda_ipc, tcp):
        assert module.obstacle(facts(0), facts(1)) is None
    for module in (shm, staged, cuda_ipc):
        apart = module.obstacle(facts(0), facts(1, host="g"))
        assert apart == "node0 and node1 do not share memory"
        users = module.obstacle(facts(0), facts(1, uid=8))
        assert users == "the processes belong to users 7 and 8"
    for rank in range(2):
        sides = [facts(0), facts(1)]
        sides[rank] = facts(rank, gpu="", device="cpu")
        assert staged.obstacle(*sides) == f"rank {rank} has no GPU of NVIDIA (device cpu)"
        sides[rank] = facts(rank, tcp_address=None)
        assert f"rank {rank} on node{rank} listens on no address" in str(tcp.obstacle(*sides))
        for ours in (True, False):
            access = {f"gpu{1 - rank}": not ours, f"gpu{rank}": ours}
            sides[rank] = facts(rank, gpu_access=access)
            text = f"the GPU of rank {rank} has no peer access to the one of rank {1 - rank}"
            assert cuda_ipc.obstacle(*sides) == (text if ours else None)


@pytest.mark.parametrize(
    ("networks", "missing", "kind", "says"),
    [
        (("RoCE", "RoCE"), "", "rdma", ""),
        (("RoCE", "RoCE"), "no RDMA device", "tcp", "rdma: rank 1 on node1: no RDMA device"),
        (("RoCE", "InfiniBand"), "", "tcp", "rank 0 is on RoCE v2, rank 1 on InfiniBand"),
    ],
)
def test_hosts_with_rdma_use_it_and_others_say_why_not(
    networks: Sequence[str], missing: str, kind: str, says: str
) -> None:
    sides = []
    for rank, network in enumerate(networks):
        place = {"device": "", "port": 1, "gid_index": 0, "infiniband": network != "RoCE"}
        found = {"missing": missing} if missing and rank else {"places": [place]}
        sides.append(facts(rank, host=f"h{rank}", gpu="", device="cpu", found={"rdma": found}))
    choice = choose(sides[0], sides[1], kinds_of_links())
    assert choice.kind.name == kind and says in choice.reason
    if says:
        with pytest.raises(TransportUnavailable, match=says):
            choose(sides[0], sides[1], kinds_of_links("rdma"), "rdma")


# Opening ------------------------------------------------------------------------------------------

LINK = [ChannelSpec(0, 1, 0, Direction.FORWARD, 64)]


@pytest.mark.parametrize(
    ("kind", "node_ips", "host"),
    [("auto", None, None), ("shm", None, None), ("tcp", None, "127.0.0.1")]
    + [(name, "10.0.0.9", "10.0.0.9") for name in ("auto", "shm", "tcp")],
)
def test_a_rank_listens_for_other_hosts_only_where_it_is_told_to(
    kind: str, node_ips: str | None, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(store: Any, rank: int, options: Any, tcp_host: str | None) -> Any:
        raise SetupError(f"listens on {tcp_host}")

    monkeypatch.setattr(opening, "Meeting", listen)
    options = TransportOptions(node_ips=node_ips)
    with pytest.raises(SetupError, match=f"listens on {host}"):
        open_transport(LINK, rank=1, store=HashStore(), kind=kind, options=options)


@pytest.mark.parametrize(
    ("cores", "local", "asked", "spins"),
    [
        (4, "4", None, True), (3, "4", None, False), (2, None, None, True),
        (1, None, None, False), (1, "4", True, True), (9, "4", False, False),
    ],
)  # fmt: skip
def test_a_rank_spins_where_every_rank_has_a_core(
    cores: int, local: str | None, asked: bool | None, spins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    given: list[dict[str, Any]] = []
    library = Library(lambda made, rank: made)
    make = library.Transport
    monkeypatch.setattr(
        library, "Transport", lambda **options: given.append(options) or make(**options)
    )
    monkeypatch.setattr(opening, "load_native", lambda: library)
    with opened("shm", LINK, spin=asked, timeout=8.0, max_pending=16, checksum=True):
        pass
    assert len(given) == 2
    for options in given:
        assert options["spin"] is spins and options["checksum"] is True
        assert (options["timeout"], options["max_pending"]) == (8.0, 16)


def test_channels_of_other_ranks_are_refused() -> None:
    own = ChannelSpec(1, 1, 0, Direction.FORWARD, 8)
    for channels, rank, store, board, says in (
        (LINK, 2, HashStore(), (), "rank 2 neither sends nor receives on the channel forw"),
        (LINK, 1, None, (), "no store to find them"),
        ([own], 1, None, (1, 2), "no store to find them"),
        ([own, *LINK], 1, HashStore(), (), "rank 1 has a channel to itself beside others"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_transport(channels, rank=rank, store=store, board_ranks=board)
    with open_transport([own], rank=1, store=None, board_ranks=(1,), board_counters=3) as alone:
        assert alone.board is not None and list(alone.board.common()) == [0, 0, 0]


def test_a_gpu_reaches_itself_and_its_peers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"a": "same", "b": "yes", "c": "no"}
    own = SimpleNamespace(uuid="a", access_to=ways.__getitem__, visible=lambda: list(ways))
    asked: list[int] = []

    def device(number: int) -> Any:
        asked.append(number)
        if number == 1:
            raise TransportUnavailable("no driver")
        return own

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    library = SimpleNamespace(CudaDevice=device)
    found = [
        opening.gpu_facts(library, torch.device(d)) for d in ("cuda:0", "cuda", "cuda:1", "cpu")
    ]
    assert found == [("a", {"a": True, "b": True, "c": False})] * 2 + [("", {})] * 2
    assert asked == [0, 5, 1]


# Numbers ------------------------------------------------------------------------------------------

CHANNEL = {
    "source": 0, "destination": 1, "chunk": 0, "direction": Direction.FORWARD, "slot_bytes": 64,
    "depth": 2,
}  # fmt: skip
HUGE = 10**5000


def test_numbers_that_no_transport_takes_are_refused_by_name() -> None:
    for name in ("source", "destination", "chunk", "slot_bytes", "depth"):
        for value in (1 << 32, 1 << 63, HUGE, -1, 2.5, True, "2"):
            if (name, value) in (("slot_bytes", 1 << 32), ("chunk", -1)):  # of credits
                continue
            with pytest.raises(ConfigError, match=rf"{name} is .*; expected a whole number from"):
                ChannelSpec(**CHANNEL | {name: value})
    ChannelSpec(**CHANNEL | {"slot_bytes": 0, "depth": 1})
    ChannelSpec(**CHANNEL | {"slot_bytes": 1 << 46})
    with pytest.raises(ConfigError, match=f"3 slots of {1 << 46} bytes; the most is {1 << 47}"):
        ChannelSpec(**CHANNEL | {"slot_bytes": 1 << 46, "depth": 3})
    with pytest.raises(ConfigError, match=r"depth is 0; expected .* from 1 to 1048576 \(DppConfig"):
        ChannelSpec(**CHANNEL | {"depth": 0})
    for counters in (-1, 1 << 32, 2.5):
        with pytest.raises(ConfigError, match=r"board_counters is .*; expected a whole number"):
            open_transport(LINK, rank=0, store=None, board_counters=counters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["timeout", "setup_timeout", "peer_timeout"])
def test_waits_have_an_end(name: str) -> None:
    assert getattr(TransportOptions(**{name: 0.001}), name) == 0.001
    for wrong in (0, -1, float("inf"), float("nan"), 1e300, "3"):
        with pytest.raises(ConfigError, match=f"option {name} is .*; expected a number from 0.001"):
            TransportOptions(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "good", "wrong", "says"),
    [
        ("workload", (1, 1 << 40), (0, 1 << 64), "expected a whole number from 1 to"),
        ("tcp_connections", (1, 16), (0, 17, 2.5), "expected a whole number from 1 to 16"),
        ("max_pending", (1, 2, 1024), (0, -4, 1 << 32), "expected a whole number from 1 to"),
        ("max_pending", (), (3, 6), "give a power of two"),
        ("gpudirect", ("auto", "on", "off"), ("yes",), "expected one of auto, on, off"),
    ],
)
def test_options_have_ranges(name: str, good: Any, wrong: Any, says: str) -> None:
    for value in good:
        assert getattr(TransportOptions(**{name: value}), name) == value
    for value in wrong:
        with pytest.raises(ConfigError, match=f"transport option {name} is {value}; {says}"):
            TransportOptions(**{name: value})
    config, options = DppConfig(), TransportOptions()
    assert getattr(options, name) == getattr(config, name, getattr(options, name))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("traffic_class", "96", 96), ("service_level", "15", 15), ("pkey_index", "1", 1),
        ("gid_index", "-1", -1), ("timeout", "14", 14), ("retries", "2", 2),
        ("devices", "mlx5_0,mlx5_3:1", "mlx5_0,mlx5_3:1"), ("adaptive_routing", "off", "off"),
        ("timeout", "", 20),
        ("traffic_class", "256", "is 256; expected a whole number from 0 to 255"),
        ("service_level", "-1", "is -1; expected a whole number from 0 to 15"),
        ("timeout", "0", "is 0; expected a whole number from 1 to 31"),
        ("retries", "8", "is 8; expected a whole number from 0 to 7"),
        ("gid_index", "two", "is 'two'; expected a whole number from -1 to 255"),
        ("adaptive_routing", "yes", "is yes; expected one of auto, on, off"),
    ],
)  # fmt: skip
def test_rdma_is_tuned_by_variables_of_the_environment(
    name: str, value: str, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DPP_RDMA_{name.upper()}", value)
    if isinstance(says, str) and says.startswith("is "):
        with pytest.raises(ConfigError, match=f"{variable(name)} {says}"):
            TransportOptions()
    else:
        assert getattr(TransportOptions().rdma, name) == says


# The port with an address -------------------------------------------------------------------------

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
    monkeypatch.setattr(rdma_ports, "addresses", lambda: {"10.0.0.5": interface})
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
