"""The choice of a rank's RDMA ports, of their addresses, and of the two ends of a link."""

from __future__ import annotations

import pytest

from megatron.dpp.transport.options import RdmaOptions
from megatron.dpp.transport.rdma_ports import choose_named, choose_place
from tests.transport.test_rdma import LOCAL, MAPPED, port

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
    named, _ = choose_named(ports, RdmaOptions(devices="mlx5_2"), "10.0.0.5", None, {}, 0)
    found, _ = choose_place(ports, "10.0.0.5", [("mlx5_2", 1)])
    assert named is not None and found is not None
    assert (named.gid_index, found.gid_index) == (index, index)
