"""Moving tensors between pipeline ranks: channels, and the kinds that carry them.

Start reading at ``base.py`` (the contract), then ``open.py`` (how a transport comes to be) and
``fake.py`` (the smallest implementation). This room knows nothing of schedules; ``runtime/`` calls
it.
"""

from megatron.dpp.direction import Direction
from megatron.dpp.transport.base import (
    Board,
    ChannelSpec,
    LinkInfo,
    Message,
    Transport,
)
from megatron.dpp.transport.fake import FakeNetwork, VirtualClock
from megatron.dpp.transport.open import open_transport
from megatron.dpp.transport.options import TransportOptions

__all__ = [
    "Board",
    "ChannelSpec",
    "Direction",
    "FakeNetwork",
    "LinkInfo",
    "Message",
    "Transport",
    "TransportOptions",
    "VirtualClock",
    "open_transport",
]
