"""Expert groups across two hosts, which are network namespaces (``tests/netns.py``).

Each pipeline stays on a host; the replicas that share experts do not. Their boards span the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.netns import ADDRESSES, Hosts, two_hosts
from tests.runtime import cases
from tests.runtime.cases import ALLGATHER, EXPERTS, GLOBAL, LATE, OPTIMIZED, case


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def check(hosts: Hosts, num_ranks: int, *given: dict[str, Any], neighbours: int = 1) -> None:
    """Run the cases; ``neighbours`` ranks in a row are on one host, the next ones on the other."""

    def place(rank: int) -> tuple[str, dict[str, str]]:
        host = rank // neighbours % 2
        return hosts.names[host], {
            "MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": hosts.devices[host],
            "LOCAL_WORLD_SIZE": str(num_ranks // 2),
        }  # fmt: skip

    cases.check(num_ranks, *given, place=place)


def test_experts_of_two_hosts_train_as_with_the_static_schedule(hosts: Hosts) -> None:
    two = {"ep": 2, "layers": 2, "model": EXPERTS}
    check(hosts, 4, case("ep2", 2, 4, {"inject": LATE}, **two, deviates=1))


@pytest.mark.slow
def test_settings_with_experts_of_two_hosts(hosts: Hosts) -> None:
    fused, late = {"split_backward": "off", "inject": LATE}, {"inject": LATE}
    two = {"ep": 2, "layers": 4}
    jitter = EXPERTS | {"moe_input_jitter_eps": 0.1}
    check(
        hosts, 4,
        case("v2", 2, 4, fused, late, v=2, **two, model=jitter, dropout=0.1, **OPTIMIZED),
        case("allgather", 2, 4, fused, late, **two, model=EXPERTS | ALLGATHER),
        case("global loss", 2, 4, late, layers=4, model=EXPERTS | GLOBAL),
        case("evaluations", 2, 4, late, **two, model=EXPERTS, between=True),
        case("unlike lengths", 2, 4, late, **two, model=EXPERTS | {"variable_seq_lengths": True},
             lengths=True),
    )  # fmt: skip


@pytest.mark.slow
def test_two_members_on_each_of_two_hosts(hosts: Hosts) -> None:
    """One rank of each host speaks for the other; the pipelines stay on a host."""
    late = {"inject": LATE}
    check(
        hosts, 8,
        case("ep4", 2, 4, late, ep=4, layers=2, model=EXPERTS),
        case("tp2 ep2", 2, 4, late, v=2, tp=2, sp=True, ep=2, etp=1, layers=4, model=EXPERTS),
        neighbours=2,
    )  # fmt: skip
