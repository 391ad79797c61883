"""The ranks that follow one leader, this host's address, and what links are opened with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.direction import Direction
from megatron.dpp.runtime import links as opening
from megatron.dpp.runtime import stage_group
from megatron.dpp.runtime.links import Links, open_links, own_address
from megatron.dpp.runtime.stage_group import StageGroup, stage_group_of
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry
from megatron.dpp.transport.base import ChannelSpec
from tests.fake_network import FakeNetwork

# Groups -------------------------------------------------------------------------------------------


class Group:
    """A process group that is its ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)


ALONE, BOTH, STAGE = Group(6), Group(6, 7), Group(4, 5, 6, 7)
EXPERTS = {"num_moe_experts": 4, "expert_model_parallel_size": 2}
SHARED: list[tuple[Group, Group, dict[str, Any], list[Any], tuple[int, ...], Any, bool]] = [
    # tensor and context group of rank 6, config or groups, those of other ranks; the ranks that run
    # one order, their group, and if they are of one replica
    (ALONE, ALONE, {}, [], (), None, True),
    # Without experts nothing is joined, whatever is set for them.
    (ALONE, ALONE, {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2,
                    "balanced": True}, [], (), None, True),
    (ALONE, ALONE, {**EXPERTS, "tp_ep": ALONE, "tp_dp_cp": Group(4, 6)}, [], (), None, True),
    # Tensor and context ranks follow the lowest.
    (BOTH, ALONE, {"tp_cp": BOTH}, [], (6, 7), BOTH, True),
    (ALONE, BOTH, {"tp_cp": BOTH}, [], (6, 7), BOTH, True),
    # Experts join replicas; a tensor neighbour follows that shares none of them.
    (ALONE, ALONE, {**EXPERTS, "tp_ep": Group(6, 4), "tp_dp_cp": STAGE}, [[[4, 6]], [[5, 7]]],
     (4, 6), STAGE, False),
    (BOTH, ALONE, {**EXPERTS, "tp_cp": BOTH, "tp_ep": Group(4, 6), "tp_dp_cp": STAGE}, [[[4, 6]]],
     (4, 6, 7), STAGE, False),
    # Inside of one replica they keep its sizes.
    *((tensor, context, {**EXPERTS, "tp_cp": BOTH, "tp_ep": BOTH, "tp_dp_cp": STAGE}, [[[4, 5]]],
       (6, 7), STAGE, True) for tensor, context in ((BOTH, ALONE), (ALONE, BOTH))),
    # Divided unlike the layers they cross replicas.
    *((BOTH, ALONE, {"num_moe_experts": 4, "expert_tensor_parallel_size": size, "tp_cp": BOTH,
                     "tp_ep": STAGE, "tp_dp_cp": STAGE}, [], (4, 5, 6, 7) if crosses else (6, 7),
       STAGE if crosses else BOTH, not crosses)
      for size, crosses in ((None, False), (1, False), (2, False), (4, True), (3, True))),
    # A global loss joins all replicas where there are several.
    *((ALONE, ALONE, {"num_moe_experts": 4, "balanced": balanced, "tp_dp_cp": STAGE,
                      "dp_cp": Group(*range(6, 6 + replicas))}, [], (4, 5, 6, 7) if joined else (),
       STAGE if joined else None, not joined)
      for balanced, replicas, joined in ((True, 2, True), (True, 1, False), (False, 2, False))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "context", "given", "others", "ranks", "group", "one_replica"), SHARED
)
def test_ranks_that_share_collectives_in_tasks_follow_one_leader(
    monkeypatch: pytest.MonkeyPatch, tensor: Group, context: Group, given: dict[str, Any],
    others: list[Any], ranks: tuple[int, ...], group: Any, one_replica: bool,
) -> None:  # fmt: skip
    """No collective without experts."""
    gathered: list[Any] = []

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        gathered.append(group)
        found[:] = [mine, *others]

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    monkeypatch.setattr(stage_group, "get_process_group_ranks", lambda group: list(group.ranks))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    config = {
        "num_moe_experts": None, "expert_tensor_parallel_size": None,
        "expert_model_parallel_size": 1, "tensor_model_parallel_size": tensor.size(),
    }  # fmt: skip
    config |= {name: given[name] for name in config if name in given}
    groups = {name: value for name, value in given.items() if isinstance(value, Group)}
    call: Any = SimpleNamespace(
        pg_collection=SimpleNamespace(tp=tensor, cp=context, **groups),
        config=SimpleNamespace(**config), has_global_aux_loss=given.get("balanced", False),
    )  # fmt: skip
    found = stage_group_of(call)
    assert (found.ranks, found.one_replica) == (ranks, one_replica)
    assert not ranks or found.group is group
    assert bool(gathered) <= ("num_moe_experts" in given)


def test_the_largest_of_each_value_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def all_reduce(values: torch.Tensor, op: Any, group: Any) -> None:
        asked.append((op, group))
        values.copy_(torch.maximum(values, torch.tensor([0.0, 9.0], dtype=values.dtype)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    cpu = torch.device("cpu")
    assert StageGroup().largest(3.0, 1e9 + 1, device=cpu) == [3.0, 1e9 + 1] and not asked
    assert StageGroup((0, 1), BOTH).largest(3.0, 1e9 + 1, device=cpu) == [3.0, 1e9 + 1]  # type: ignore[arg-type]
    assert StageGroup((0, 1), BOTH).largest(3.0, 1.0, device=cpu) == [3.0, 9.0]  # type: ignore[arg-type]
    assert asked == [(torch.distributed.ReduceOp.MAX, BOTH)] * 2


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "master", "ips", "expected"),
    [
        ("2", "10.0.0.1", None, "towards 10.0.0.1"),
        ("2", None, None, None),
        ("4", "10.0.0.1", None, None),
        (None, "10.0.0.1", None, None),
        ("2", "10.0.0.1", "10.1.0.1,10.1.0.2", "10.1.0.2"),
    ],
)
def test_a_host_of_several_has_the_address_that_it_is_given_or_that_the_master_sees(
    monkeypatch: pytest.MonkeyPatch, local: str | None, master: str | None, ips: str | None,
    expected: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(opening, "address_towards", lambda host: f"towards {host}")
    for name, value in (("LOCAL_WORLD_SIZE", local), ("MASTER_ADDR", master)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert own_address(DppConfig(node_ips=ips)) == expected


# Links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "ips", "address_of"),
    [
        (0, None, "route"),
        (1, "10.0.0.1,10.0.0.2", "node"),
        (1, "10.0.0.1,10.0.0.2,::3,::4", "rank"),
    ],
)
def test_links_are_opened_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, own: int, ips: str | None, address_of: str
) -> None:
    """A board counts two numbers for each channel that ends at this rank. The transport knows whose
    its address is.
    """
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: own)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(opening, "own_address", lambda config: "10.0.0.7")
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_get_default_store", lambda: "the store"
    )
    monkeypatch.setattr(
        opening, "open_transport", lambda specs, **rest: given.update(rest, specs=specs)
    )
    config = DppConfig(
        transport="tcp",
        timeout=7.0,
        checksum=True,
        gpudirect="off",
        token_file="secret",
        node_ips=ips,
    )
    for name, value in {
        "WORKLOAD": "9", "PEER_TIMEOUT": "3", "TCP_CONNECTIONS": "2",
        "LISTEN_PORTS": "5000-5009",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"DPP_{name}", value)
    forward = [ChannelSpec(0, 1, chunk, Direction.FORWARD, 8) for chunk in range(3)]
    specs = [*forward, ChannelSpec(1, 0, 0, Direction.BACKWARD, 8)]
    open_links(specs, config, (own, 2))
    assert (given["specs"], given["rank"], given["store"]) == (specs, own, "the store")
    assert (given["kind"], given["board_ranks"]) == ("tcp", (own, 2))
    assert given["board_counters"] == 2 * (3 if own else 1)
    options = given["options"]
    assert (options.timeout, options.checksum, options.workload) == (7.0, True, 9)
    assert (options.gpudirect, options.address_of) == ("off", address_of)
    assert (options.node_ips, options.token_file) == ("10.0.0.7", "secret")
    assert (options.peer_timeout, options.abandon_after) == (3.0, 3.0)
    assert (options.tcp_connections, options.listen_ports) == (2, (5000, 5009))
    open_links(specs, config)
    assert given["board_ranks"] is None
    open_links([], config, (own, 2))
    assert given["board_ranks"] is None and given["store"] is None, "nothing arrives"


@pytest.mark.parametrize("received", [1, 2])
def test_a_microbatch_has_arrived_with_all_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, received: int
) -> None:
    """Each channel counts in the tensors of its own boundary."""
    topology = Topology((0, 1, 2), 1, 1)
    specs = topology.channels([4] * received, [4, 4, 4], 4)
    network = FakeNetwork(list(specs), ahead=True)
    links = Links(network.transport(1), topology, received, 3)
    places = {direction: at for at, (direction, _) in enumerate(links.receiving)}
    before, behind = network.transport(0), network.transport(2)
    for part in range(4):
        sent = {"part": part % received, "num_parts": received}
        before.put(0, torch.zeros(1), iteration=0, microbatch=0, **sent)
        behind.put(0, torch.zeros(1), iteration=0, microbatch=0, part=part % 3, num_parts=3)
    for counted in (links.poll(), links.coming()):
        assert counted[places[Direction.FORWARD]] == 4 // received
        assert counted[places[Direction.BACKWARD]] == 1
    assert not Links(FakeNetwork(list(specs)).transport(1), topology, received, 3).coming()
    monkeypatch.setattr(opening, "why_not_ahead", lambda transport: "it would hold up others")
    assert not Links(network.transport(1), topology, received, 3).coming()


@pytest.mark.parametrize("forward_only", [False, True])
def test_an_evaluation_counts_no_gradients_as_consumed(forward_only: bool) -> None:
    topology = Topology((0, 1), 0, 2)
    network = FakeNetwork(list(topology.channels([4], [4], 2)))
    links = Links(network.transport(0), topology)
    for _ in range(2):
        links.consume(Geometry(2, 0, 2, 5, forward_only=forward_only))
    counted = dict(zip(links.receiving, links.consumed, strict=True))
    gradients = 0 if forward_only else 10
    assert counted == {
        (Direction.FORWARD, 1): 10, (Direction.BACKWARD, 0): gradients,
        (Direction.BACKWARD, 1): gradients,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "connections", "told"),
    [("cuda_ipc", "1", True), ("shm", "1", False), ("cuda_ipc", "8", False)],
)
def test_what_hinders_a_launch_ahead_is_told(
    kind: str, connections: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    transport: Any = SimpleNamespace(links=lambda: [SimpleNamespace(kind=kind)])
    reason = opening.why_not_ahead(transport)
    assert (reason is not None) is told


def test_replicas_include_the_context_ranks_of_megatrons_own_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def default(check_initialized: bool = True, with_context_parallel: bool = False) -> str:
        return "with context" if with_context_parallel else "without"

    monkeypatch.setattr(parallel_state, "get_tensor_and_data_parallel_group", default)
    for given, expected in (({}, "with context"), ({"tp_dp_cp": "the call's"}, "the call's")):
        assert compat.group_of(SimpleNamespace(**given), "tp_dp_cp") == expected


@pytest.mark.parametrize(
    ("groups", "rank", "together"),
    [
        ([], 3, (3,)),
        ([[0, 1], [2, 3]], 2, (2, 3)),
        ([[0, 1], [2, 3], [4, 5], [0, 1, 2], [3, 4, 5]], 5, (0, 1, 2, 3, 4, 5)),
        ([[6, 4], [4, 2], [1, 3], [2, 0]], 6, (0, 2, 4, 6)),
        ([[0, 1], [1, 2], [2, 3], [5, 6]], 0, (0, 1, 2, 3)),
    ],
)
def test_overlapping_groups_are_joined(
    groups: list[list[int]], rank: int, together: tuple[int, ...]
) -> None:
    assert stage_group.joined(groups, rank) == together
