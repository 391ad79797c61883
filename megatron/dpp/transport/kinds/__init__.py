"""The transport kinds.

Each module of this folder is one kind. The module's name is the kind's name and a value of
``DppConfig.transport``; its ``KIND`` is a :class:`TransportKind`. All other code asks that for
capabilities and compares no names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.dpp.config import TRANSPORT_KINDS
from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.transport.base import Transport
from megatron.dpp.transport.joining import Facts, PeerLink, Request, Setup
from megatron.dpp.transport.options import TransportOptions

AUTO = TRANSPORT_KINDS[0]


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A kind and its capabilities.

    A kind of *links* has ``obstacle`` and ``join``, and shares the native transport with other
    kinds. A kind with ``open`` makes a transport of its own, on request only.

    Args:
        name: of the module.
        preference: order in which ``auto`` tries the kinds of links, lowest first.
        reason: text that explains why ``auto`` took it.
        obstacle: reason why two ranks cannot have such a link, or None. A pure function: both
            ranks call it with equal arguments, the lower rank's facts first.
        look: takes the C++ extension, this host's address for other hosts (or None), the
            settings and the device of the rank's tensors; returns what ``obstacle`` and ``join``
            need to know, as JSON (``Facts.found``).
        join: makes the slots of all such links of this rank and opens the peers'; returns, by
            peer, a text to append to the link's reason.
        open: opens a transport of its own.
        between_hosts: the ends may be on two hosts, so that their clocks differ. The control
            connection of such a link is TCP.
        announces: a message may be taken before it has arrived; the GPU waits for it.
        device_memory: reads and writes CUDA tensors in place, where the rank has a GPU of NVIDIA.
        carries_board: links members of a board that have no channels with each other.
        may_fail: ``join`` may leave links in ``Setup.failed``, which ``auto`` gives to the next
            kind.
        connections: purposes of the connections that a link needs besides the control connection.
            Equal options give equal ones.
    """

    name: str
    preference: int = 0
    reason: str = ""
    obstacle: Callable[[Facts, Facts], str | None] | None = None
    look: Callable[[Any, str | None, TransportOptions, torch.device], dict[str, Any]] | None = None
    join: Callable[[Setup, Sequence[PeerLink]], Mapping[int, str]] | None = None
    open: Callable[[Request], Transport] | None = None
    between_hosts: bool = False
    announces: bool = False
    device_memory: bool = False
    carries_board: bool = False
    may_fail: bool = False
    connections: Callable[[TransportOptions], tuple[str, ...]] = lambda options: ()


def find(name: str) -> TransportKind:
    """The kind of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        kind: TransportKind = importlib.import_module(f"{__name__}.{name}").KIND
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(__name__):  # a package that the kind needs
            raise
        what = setting("transport", name)
        wrong = f"{what}: expected one of {', '.join(TRANSPORT_KINDS)}"
        raise ConfigError(wrong, what) from error
    return kind


def kinds_of_links(wanted: str = AUTO) -> list[TransportKind]:
    """The kinds of links that ``wanted`` allows, in order of preference."""
    names = TRANSPORT_KINDS[1:] if wanted == AUTO else (wanted,)
    kinds = (find(name) for name in names)
    return sorted((kind for kind in kinds if kind.join), key=lambda kind: kind.preference)


def kinds_of_boards() -> list[TransportKind]:
    """The kinds that link the members of a board: within a host, and between hosts."""
    return [kind for kind in kinds_of_links() if kind.carries_board]
