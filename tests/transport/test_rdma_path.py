"""RDMA links whose queue pairs connect, but which do not carry what is written."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.dpp.errors import TransportUnavailable
from megatron.dpp.transport.options import RdmaOptions
from tests.transport.conftest import Trouble
from tests.transport.kinds import opened, pair, take_next

SOON = {"setup_timeout": 6.0}
"""A link is given a quarter of it to deliver the test pattern."""
LOST = r"rank [01]: a write to rank [01] over fake0 port 1 has not completed after 1\.5 s"
WRONG = r"rank [01]: byte 0 of 4096 arrived wrong over fake0 port 1"


@pytest.mark.parametrize(
    ("fault", "times", "text"),
    [
        ("lose-writes", 1000, LOST),  # UDP port 4791 is closed both ways
        ("lose-writes", 1, LOST),  # one queue pair of one rank finds no way
        ("lose-host-writes", 1, WRONG),
        ("error-status", 12, "rank [01]: .*transport retry counter exceeded"),
    ],
)
def test_auto_gives_a_link_that_carries_nothing_to_tcp_on_both_ends(
    trouble: Trouble, fault: str, times: int, text: str
) -> None:
    trouble(fault, times)
    large = torch.arange(1 << 18)
    with opened("auto", pair(large.nbytes), **SOON) as (a, b):
        links = [end.links()[0] for end in (a, b)]
        for sender, receiver in ((a, b), (b, a)):
            sender.put(0, large, iteration=0, microbatch=0)
            assert torch.equal(take_next(receiver, 0, 0).tensor, large)
    assert [link.kind for link in links] == ["tcp", "tcp"]
    assert links[0].reason == links[1].reason
    assert re.search(rf"\[rdma: {text}.*\]$", links[0].reason), links[0].reason


@pytest.mark.parametrize(("fault", "text"), [("lose-writes", LOST), ("lose-host-writes", WRONG)])
def test_a_link_that_was_asked_for_and_carries_nothing_is_an_error(
    trouble: Trouble, fault: str, text: str
) -> None:
    trouble(fault, 1000)
    with pytest.raises(TransportUnavailable) as caught, opened("rdma", pair(), **SOON):
        pass
    said = str(caught.value)
    assert re.match(rf"rank [01]: DppConfig\(transport='rdma'\): {text}", said), said
    assert "has to deliver a test pattern" in said
    for knob in ("UDP port 4791", "DppConfig(rdma_devices=...)", "DppConfig(transport='tcp')"):
        assert knob in said, said


def test_the_test_waits_for_packets_that_are_sent_again(trouble: Trouble) -> None:
    """Two losses of 4.3 s each, or of what the flag says, and no longer."""
    trouble("lose-writes", 1000)
    options = RdmaOptions(timeout=18)  # 1.07 s
    with opened("auto", pair(), rdma=options, setup_timeout=40.0) as (a, _):
        reason = a.links()[0].reason
    assert "has not completed after 7.1 s" in reason, reason


def test_a_link_that_delivers_is_used_and_its_slots_are_free(trouble: Trouble) -> None:
    trouble("reset", 0)
    with opened("rdma", pair(8, depth=1)) as (a, b):
        for number in range(5):
            a.put(0, torch.full((1,), number), iteration=0, microbatch=number)
            assert take_next(b, 0, number).tensor.item() == number
