"""The kind that a link gets: from the facts of both ranks, and from the options."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.dpp.transport.choose import choose
from torch.distributed import HashStore

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, SetupError, TransportUnavailable
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    TransportOptions,
    open_transport,
    rdma_ports,
)
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.kinds import TransportKind, cuda_ipc, shm, staged, tcp
from tests.transport.kinds import PATIENCE, Library, opened, take_next


def facts(rank: int, **changes: Any) -> Facts:
    fields = {
        "rank": rank, "abi": 1, "host": "h", "hostname": f"node{rank}", "uid": 7, "pid": 1,
        "device": "cuda", "unix_address": "", "tcp_address": ("10.0.0.1", 1), "settings": {},
        "gpu": f"gpu{rank}",
    }  # fmt: skip
    return Facts(**{**fields, **changes})


def kind(name: str, against: str | None = None, **capabilities: Any) -> TransportKind:
    return TransportKind(
        name=name, reason=f"{name} fits", obstacle=lambda one, other: against, **capabilities
    )


# A pair of ranks ----------------------------------------------------------------------------------


def test_both_ranks_ask_a_kind_in_one_order() -> None:
    asked: list[tuple[int, int]] = []

    def obstacle(one: Facts, other: Facts) -> None:
        asked.append((one.rank, other.rank))

    asks = TransportKind(name="asks", reason="", obstacle=obstacle)
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
    one = kind("one", device_memory=in_place)
    other = facts(1, **changes)
    if changes.get("device") == "cpu":
        choice = choose(facts(0, **changes), other, [one])
    else:
        choice = choose(facts(0), other, [one])
    note = "; CUDA tensors pass through the host's memory" if noted else ""
    assert choice.reason == f"one fits{note}"


def test_only_a_link_between_hosts_says_which_better_one_was_not_possible() -> None:
    local, fast = kind("local", "far", between_hosts=False), kind("fast", "no card")
    fast = dataclasses.replace(fast, between_hosts=True)
    slow = kind("slow", between_hosts=True, device_memory=True)
    here = kind("here", device_memory=True)
    assert choose(facts(0), facts(1), [local, fast, slow]).reason == "slow fits [fast: no card]"
    assert choose(facts(0), facts(1), [local, slow]).reason == "slow fits"
    assert choose(facts(0), facts(1), [fast, here]).reason == "here fits"


def test_a_kind_that_may_fail_has_the_next_possible_one_behind_it() -> None:
    may_fail = kind("may-fail", may_fail=True, connections=lambda options: ("a",))
    kinds = [
        may_fail,
        kind("never", "no"),
        kind("next", connections=lambda options: ("b", "c")),
        kind("last"),
    ]
    choice = choose(facts(0), facts(1), kinds)
    assert choice.kind is may_fail and choice.instead is not None
    assert choice.instead.kind.name == "next" and choice.instead.instead is None
    assert choice.connections(TransportOptions()) == ("a", "b", "c")
    asked_for = choose(facts(0), facts(1), kinds, "may-fail")
    assert asked_for.instead is None and asked_for.reason.startswith("asked for: may-fail")


def test_every_obstacle_is_named_where_no_kind_is_possible() -> None:
    kinds = [kind("one", "too far"), kind("two", "too old")]
    text = r"transport='auto'\) between rank 0 \(node0\) and rank 4 \(node4\): one: too far; two:"
    with pytest.raises(TransportUnavailable, match=text):
        choose(facts(4), facts(0), kinds)
    with pytest.raises(TransportUnavailable, match="it links no ranks"):
        choose(facts(4), facts(0), [])


def test_what_stands_against_a_kind() -> None:
    good = facts(0), facts(1)
    for module in (shm, staged, cuda_ipc, tcp):
        assert module.obstacle(*good) is None
    hosts = facts(0), facts(1, host="g")
    users = facts(0), facts(1, uid=8)
    for module in (shm, staged, cuda_ipc):
        assert module.obstacle(*hosts) == "node0 and node1 do not share memory"
        assert module.obstacle(*users) == "the processes belong to users 7 and 8"
    for rank in range(2):
        sides = [facts(0), facts(1)]
        sides[rank] = facts(rank, gpu="", device="cpu")
        assert staged.obstacle(*sides) == f"rank {rank} has no GPU of NVIDIA (device cpu)"
        sides[rank] = facts(rank, tcp_address=None)
        assert f"rank {rank} on node{rank} listens on no address" in str(tcp.obstacle(*sides))
        sides[rank] = facts(rank, gpu_access={f"gpu{1 - rank}": False, f"gpu{rank}": True})
        text = f"the GPU of rank {rank} has no peer access to the one of rank {1 - rank}"
        assert cuda_ipc.obstacle(*sides) == text
        sides[rank] = facts(rank, gpu_access={f"gpu{1 - rank}": True, f"gpu{rank}": False})
        assert cuda_ipc.obstacle(*sides) is None


# Opening ------------------------------------------------------------------------------------------

LINK = [
    ChannelSpec(0, 1, 1, Direction.FORWARD, 10, 2),
    ChannelSpec(0, 1, 0, Direction.BACKWARD, 30, 4),
    ChannelSpec(0, 1, 0, Direction.FORWARD, 40, 5),
]


def test_both_ends_list_the_channels_of_a_link_in_one_order() -> None:
    store, ends = HashStore(), {}

    def open_one(rank: int) -> None:
        specs = LINK[::-1] if rank else LINK
        ends[rank] = open_transport(specs, rank=rank, store=store, kind="shm")

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    with ends[0] as sender, ends[1] as receiver:
        for channel, spec in enumerate(LINK):
            sender.put(channel, torch.zeros(spec.slot_bytes // 4), iteration=0, microbatch=channel)
            assert take_next(receiver, 2 - channel, 0).microbatch == channel


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
        (4, "4", None, True),
        (3, "4", None, False),
        (2, None, None, True),
        (1, None, None, False),
        (1, "4", True, True),
        (9, "4", False, False),
    ],
)
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


# Options, and the rest of what a rank looks up ----------------------------------------------------


def test_options_default_to_those_of_a_run() -> None:
    config, options = DppConfig(), TransportOptions()
    for name in ("timeout", "workload", "checksum", "gpudirect", "peer_timeout", "token_file",
                 "tcp_connections"):  # fmt: skip
        assert getattr(options, name) == getattr(config, name), name
    for field in dataclasses.fields(options.rdma):
        assert getattr(options.rdma, field.name) == getattr(config, f"rdma_{field.name}")


def test_a_gpu_reaches_itself_and_its_peers_alone() -> None:
    ways = {"a": "same", "b": "yes", "c": "no"}
    own = SimpleNamespace(uuid="a", access_to=ways.__getitem__, visible=lambda: list(ways))
    asked: list[int] = []

    def device(number: int) -> Any:
        asked.append(number)
        if number == 1:
            raise TransportUnavailable("no driver")
        return own

    library = SimpleNamespace(CudaDevice=device)
    access = {"a": True, "b": True, "c": False}
    assert opening.gpu_facts(library, torch.device("cuda", 3)) == ("a", access)
    assert opening.gpu_facts(library, torch.device("cuda", 1)) == ("", {})
    assert opening.gpu_facts(library, torch.device("cpu")) == ("", {})
    assert asked == [3, 1]


def test_channels_of_other_ranks_are_refused() -> None:
    channel = ChannelSpec(0, 1, 0, Direction.FORWARD, 8)
    with pytest.raises(ConfigError, match="rank 2 neither sends nor receives on the channel forw"):
        open_transport([channel], rank=2, store=HashStore())
    with pytest.raises(ConfigError, match="needs a store to find them"):
        open_transport([channel], rank=1, store=None)
    own = ChannelSpec(1, 1, 0, Direction.FORWARD, 8)
    with pytest.raises(ConfigError, match="needs a store to find them"):
        open_transport([own], rank=1, store=None, board_ranks=(1, 2))
    with pytest.raises(ConfigError, match="rank 1 has a channel to itself beside others"):
        open_transport([own, channel], rank=1, store=HashStore())
    with open_transport([own], rank=1, store=None, board_ranks=(1,), board_counters=3) as alone:
        assert alone.board is not None and list(alone.board.common()) == [0, 0, 0]


# Ports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interface", "port"), [("ib0", 1), ("ib1", 2), ("ib2", 1), ("eth0", 0)])
def test_an_interface_names_its_infiniband_port(
    interface: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_ports, "Path", lambda _: tmp_path)
    monkeypatch.setattr(rdma_ports, "addresses", lambda: {"10.0.0.5": interface})
    for name in ("ib0", "ib1", "ib2"):
        (tmp_path / name / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    (tmp_path / "eth0").mkdir()
    (tmp_path / "ib1" / "dev_port").write_text("1\n")
    (tmp_path / "ib2" / "dev_port").write_text("no number")
    common = {"device": "mlx5_3", "infiniband": True, "active": True}
    ports = [{**common, "port": number, "addresses": [(0, "fe80" * 8, "IB")]} for number in (2, 1)]
    library = SimpleNamespace(rdma_ports=lambda: (ports, []))
    options = TransportOptions(address_of="rank")
    places, _ = rdma_ports.find_places(library, "10.0.0.5", options, torch.device("cpu"))
    assert [place.port for place in places] == ([port] if port else [])


def test_a_rank_without_an_address_looks_for_no_port() -> None:
    places, why = rdma_ports.find_places(None, None, TransportOptions(), torch.device("cpu"))
    assert places == [] and "node_ips" in why
    ports = [{"device": "d", "port": 1, "infiniband": True, "active": True, "addresses": []}]
    found = rdma_ports.choose_place(ports, "10.0.0.5", rdma_ports.Node(infiniband=[("d", 1)]))
    assert found[0] is None and "no RDMA port has the address" in found[1]


def test_a_gpu_is_found_by_its_address_in_hexadecimal(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0x0C)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    path = rdma_ports.gpu_path(torch.device("cuda", 0))
    assert path is not None and path.name == "0001:1b:0c.0"
    assert rdma_ports.gpu_path(torch.device("cpu")) is None
    del facts.pci_bus_id
    assert rdma_ports.gpu_path(torch.device("cuda", 0)) is None, "an older PyTorch"
