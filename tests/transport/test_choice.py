"""The kind that a link gets, and the numbers and words that are refused."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import megatron.dpp
from megatron.dpp.config import KIND_PACKAGES, TRANSPORT_KINDS, DppConfig
from megatron.dpp.errors import ConfigError, SetupError, TransportUnavailable
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    TransportOptions,
    open_transport,
)
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.kinds import (
    AUTO,
    TransportKind,
    cuda_ipc,
    find,
    kinds_of_boards,
    kinds_of_links,
    shm,
    staged,
    tcp,
)
from megatron.dpp.transport.open import choose
from megatron.dpp.transport.options import tuned
from tests.transport.kinds import KINDS, Library, of_rank, opened, pair
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
        sides[rank] = facts(rank, tcp_address=[])
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
        (LINK, 2, HashStore(), (), "rank 2 shares the channel forw.* with no other rank"),
        ([own], 1, HashStore(), (), "rank 1 shares the channel .*: a pipeline of one rank has one"),
        (LINK, 1, None, (), "no store to find them"),
        ([], 1, None, (1, 2), "no store to find them"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_transport(channels, rank=rank, store=store, board_ranks=board)
    for store in (None, HashStore()):
        with open_transport([], rank=1, store=store, board_ranks=(1,), board_counters=3) as alone:
            assert alone.board is not None and list(alone.board.common()) == [0, 0, 0]
            assert not alone.poll() and not alone.links() and alone.pending() == 0


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
    ChannelSpec(**CHANNEL | {"slot_bytes": 1 << 40})
    with pytest.raises(ConfigError, match=r"depth is 0; expected .* from 1 to 1048576 \(DppConfig"):
        ChannelSpec(**CHANNEL | {"depth": 0})
    for counters in (-1, 1 << 32, 2.5):
        with pytest.raises(ConfigError, match=r"board_counters is .*; expected a whole number"):
            open_transport(LINK, rank=0, store=None, board_counters=counters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["timeout", "setup_timeout", "peer_timeout"])
def test_waits_have_an_end(name: str) -> None:
    assert getattr(TransportOptions(**{name: 0.001}), name) == 0.001
    for wrong in (0, -1, float("inf"), float("nan"), 1e300, "3"):
        with pytest.raises(ConfigError, match=f"(?i){name} is .*; expected a number from 0.001"):
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
        with pytest.raises(ConfigError, match=f"(?i){name} is {value}; {says}"):
            TransportOptions(**{name: value})
    config, options = DppConfig(), TransportOptions()
    assert getattr(options, name) == getattr(config, name, getattr(options, name))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rdma_traffic_class", "96", 96), ("rdma_service_level", "15", 15),
        ("rdma_pkey_index", "1", 1), ("rdma_gid_index", "-1", -1), ("rdma_timeout", "14", 14),
        ("rdma_retries", "2", 2), ("rdma_devices", "mlx5_0,mlx5_3:1", "mlx5_0,mlx5_3:1"),
        ("rdma_adaptive_routing", "off", "off"), ("rdma_timeout", "", 20),
        ("workload", "9", 9), ("peer_timeout", "2.5", 2.5), ("tcp_connections", "", 4),
        ("listen_ports", "7000-7002", (7000, 7002)), ("listen_ports", "7000", (7000, 7000)),
        ("rdma_traffic_class", "256", "is 256; expected a whole number from 0 to 255"),
        ("rdma_timeout", "0", "is 0; expected a whole number from 1 to 31"),
        ("rdma_gid_index", "two", "is 'two'; expected a whole number from -1 to 255"),
        ("rdma_adaptive_routing", "yes", "is yes; expected one of auto, on, off"),
        ("tcp_connections", "2.5", "is '2.5'; expected a whole number from 1 to 16"),
        ("peer_timeout", "nan", "is nan; expected a number from 0.001"),
        *(("listen_ports", ports, f"={ports}: expected two ports from 1 to 65535")
          for ports in ("0", "7002-7000", "7000-", "70000", "x-y")),
    ],
)  # fmt: skip
def test_links_are_tuned_by_variables_of_the_environment(
    name: str, value: str, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DPP_{name.upper()}", value)
    if isinstance(says, str) and "expected" in says:
        with pytest.raises(ConfigError, match=f"DPP_{name.upper()} ?{says}"):
            TransportOptions(**tuned())
    else:
        options = TransportOptions(**tuned())
        of_rdma = name.startswith("rdma_")
        holder, field = (options.rdma, name[5:]) if of_rdma else (options, name)
        assert getattr(holder, field) == says


# The registry of kinds, which alone knows their names ---------------------------------------------

PACKAGE = Path(megatron.dpp.__file__).parent
NAMES = [name for name in TRANSPORT_KINDS if name != AUTO]


def test_every_kind_is_registered_and_goes_through_the_conformance_suite() -> None:
    assert {*NAMES, "fake"} == set(KINDS)
    for name in NAMES:
        kind = find(name)
        assert kind.name == name
        assert bool(kind.open) != bool(kind.join and kind.obstacle and kind.reason)


def test_kinds_are_tried_in_order_of_preference() -> None:
    ours = ["cuda_ipc", "staged", "shm", "rdma", "tcp"]
    assert [kind.name for kind in kinds_of_links() if kind.name in ours] == ours
    assert [kind.name for kind in kinds_of_links("tcp")] == ["tcp"]
    assert [kind.name for kind in kinds_of_boards()] == ["shm", "tcp"]


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"transport='pigeon'\): expected one of auto, .*tcp"):
        open_transport(of_rank(pair(), 0), rank=0, store=HashStore(), kind="pigeon")


def test_no_other_code_names_a_kind() -> None:
    """But ``config.py`` the packages that kinds need, which have their names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE / "transport" / "kinds":
            continue
        elsewhere = {*NAMES} - ({*KIND_PACKAGES} if path == PACKAGE / "config.py" else set())
        text = path.read_text(encoding="utf-8")
        if not any(f'"{name}"' in text for name in elsewhere):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value in elsewhere:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}")
    assert not found
