"""Channels between pipeline ranks, and the kinds that carry them.

Read ``base.py`` (the contract) first, then ``open.py`` and ``kinds/`` (one module per kind). This
room knows nothing of schedules.
"""

from megatron.dpp.direction import Direction
from megatron.dpp.transport.base import (
    ChannelSpec,
    LinkInfo,
    Transport,
)
from megatron.dpp.transport.open import open_transport
from megatron.dpp.transport.options import TransportOptions

__all__ = [
    "ChannelSpec",
    "Direction",
    "LinkInfo",
    "Transport",
    "TransportOptions",
    "open_transport",
]
