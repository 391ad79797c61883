"""The address of this host that other hosts reach."""

from __future__ import annotations

import pytest

from megatron.dpp import hosts
from megatron.dpp.errors import ConfigError


def test_the_route_decides_without_an_address() -> None:
    assert hosts.own_interface("127.0.0.1") == ("127.0.0.1", "lo")
    assert hosts.addresses()["127.0.0.1"] == "lo"


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NODE_IPS gives 192\.0\.2\.1 to this node, which has"):
        hosts.own_interface("127.0.0.1", ["192.0.2.1"])


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=nowhere\.invalid"):
        hosts.address_towards("nowhere.invalid", patience=0.0)
