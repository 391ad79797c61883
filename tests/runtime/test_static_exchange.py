"""megatron-core's exchange over our channels, where the other rank does not send."""

from __future__ import annotations

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.mcore.static import ChannelExchange, ring_channels
from megatron.dpp.transport.base import Direction
from megatron.dpp.transport.fake import FakeNetwork


def two_ranks() -> FakeNetwork:
    return FakeNetwork([*{*ring_channels((0, 1), 0, 64, 2), *ring_channels((0, 1), 1, 64, 2)}])


def test_a_sender_that_left_is_named_at_once() -> None:
    """Messages that it sent before are still taken."""
    network = two_ranks()
    sender, exchange = network.transport(0), ChannelExchange(network.transport(1), timeout=600.0)
    out = next(i for i, s in enumerate(sender.outgoing) if s.direction == Direction.FORWARD)
    sender.put(out, torch.ones(4), iteration=0, microbatch=0)
    sender.flush(5.0)
    sender.close()
    assert torch.equal(exchange.take(Direction.FORWARD), torch.ones(4))
    with pytest.raises(PeerDead, match="message 1 will not arrive: rank 0 has closed"):
        exchange.take(Direction.FORWARD)


def test_a_sender_that_is_slow_is_waited_for() -> None:
    network = two_ranks()
    network.transport(0)
    exchange = ChannelExchange(network.transport(1), timeout=0.1)
    with pytest.raises(TransferTimeout, match="its sender is alive"):
        exchange.take(Direction.FORWARD)
