"""Whole numbers that are handed to C++: what does not fit there is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp.transport import ChannelSpec, Direction, Transport, TransportOptions
from megatron.dpp.transport.open import open_transport
from tests.transport.kinds import opened, pair

CHANNEL = {
    "source": 0, "destination": 1, "chunk": 0, "direction": Direction.FORWARD, "slot_bytes": 64,
    "depth": 2,
}  # fmt: skip
HUGE = pytest.param(10**5000, id="huge")


@pytest.mark.parametrize("value", [1 << 32, 1 << 63, HUGE, -1, 2.5, True, "2"])
@pytest.mark.parametrize("name", ["source", "destination", "chunk", "slot_bytes", "depth"])
def test_a_channel_of_impossible_numbers_is_refused(name: str, value: Any) -> None:
    """A depth of 2**32 gave a cast message of the binding, slots of 2**63 bytes were none."""
    if (name, value) in (("slot_bytes", 1 << 32), ("chunk", -1)):  # credits have negative chunks
        return
    with pytest.raises(
        ConfigError, match=rf"{name} is .*; expected a whole number from [-0-9]+ to"
    ):
        ChannelSpec(**CHANNEL | {name: value})


def test_the_slots_of_a_channel_fit_into_addresses() -> None:
    ChannelSpec(**CHANNEL | {"slot_bytes": 1 << 46, "depth": 2})
    said = f"3 slots of {1 << 46} bytes; the most is {1 << 47} bytes"
    with pytest.raises(ConfigError, match=said):
        ChannelSpec(**CHANNEL | {"slot_bytes": 1 << 46, "depth": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", float("inf")), ("timeout", float("nan")), ("timeout", "3"),
        ("peer_timeout", float("inf")), ("peer_timeout", 1e300), ("setup_timeout", float("nan")),
        ("max_pending", 1 << 32), ("tcp_connections", 2.5), ("workload", 1 << 64),
    ],
)  # fmt: skip
def test_an_option_that_no_transport_takes_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"transport option {name} is .*; expected a "):
        TransportOptions(**{name: value})


@pytest.mark.parametrize("value", [-1, 1 << 32, 2.5])
def test_a_board_of_impossible_counters_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"board_counters is .*; expected a whole number"):
        open_transport([ChannelSpec(**CHANNEL)], rank=0, store=None, board_counters=value)


@pytest.fixture(scope="module")
def ends() -> Iterator[list[Transport]]:
    with opened("shm", pair(64), counters=2) as transports:
        yield transports


Call = Callable[[Transport], object]


def put(**given: Any) -> Call:
    numbers = {"iteration": 0, "microbatch": 0} | given
    return lambda transport: transport.put(0, torch.ones(2), **numbers)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *((put(**{name: value}), f"{name} is {value}; expected a whole number")
          for name in ("iteration", "microbatch", "part", "num_parts") for value in (1 << 63, 2.5)),
        (put(part=-1), "part is -1; expected a whole number"),
        (lambda end: end.put(-1, torch.ones(2), iteration=0, microbatch=0), "channel is -1; "),
        (lambda end: end.take(1 << 64), f"channel {1 << 64}: there are 1"),
        (lambda end: end.take(-1), "channel -1: there are 1"),
        (lambda end: end.board and end.board.post([0, -1]), "counter 1 is -1; expected a whole"),
    ],
)  # fmt: skip
def test_a_call_with_impossible_numbers_is_refused_and_harms_nothing(
    ends: list[Transport], call: Call, said: str
) -> None:
    with pytest.raises((ValueError, IndexError), match=re.escape(said)):
        call(ends[0])
    before = ends[1].poll()[0]
    ends[0].put(0, torch.ones(2), iteration=1, microbatch=2)
    while ends[1].poll()[0] == before:
        ends[1].wait(1.0)
    assert ends[1].take(0).microbatch == 2
