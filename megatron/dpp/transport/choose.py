"""Chooses the kind of a link: a pure function of both sides' facts. ``opening.py`` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import Text, TransportUnavailable, setting
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.kinds import AUTO, TransportKind
from megatron.dpp.transport.options import TransportOptions


@dataclass(frozen=True)
class Choice:
    """A kind, and why it was taken."""

    kind: TransportKind
    reason: str
    instead: Choice | None = None
    """The next kind, for a kind whose set-up may fail."""

    def connections(self, options: TransportOptions) -> tuple[str, ...]:
        """Purposes of the connections that the link may need besides the control connection."""
        own = self.kind.connections(options)
        return own + (self.instead.connections(options) if self.instead else ())


def choose(own: Facts, peer: Facts, kinds: Sequence[TransportKind], wanted: str = AUTO) -> Choice:
    """The first of ``kinds`` that can link two ranks; equal on both.

    Args:
        wanted: ``DppConfig.transport``.

    Raises:
        TransportUnavailable: none of them can; says why.
    """
    one, other = sorted((own, peer), key=lambda facts: facts.rank)
    obstacles: list[str] = []
    passed_over = ""  # why a better kind for other hosts is not possible
    for index, kind in enumerate(kinds):
        assert kind.obstacle is not None
        against = kind.obstacle(one, other)
        if against is None:
            note = ""
            if any(s.device != "cpu" and not (kind.device_memory and s.gpu) for s in (one, other)):
                note = "; CUDA tensors pass through the host's memory"
            if kind.between_hosts and passed_over:
                note = Text(f"{note} [{passed_over}]", passed_over)
            if wanted != AUTO:
                return Choice(kind, Text(f"asked for: {wanted}{note}", note))
            instead = choose(own, peer, kinds[index + 1 :]) if kind.may_fail else None
            return Choice(kind, Text(kind.reason + note, note), instead)
        obstacles.append(Text(f"{kind.name}: {against}", against))
        if kind.between_hosts:
            passed_over = obstacles[-1]
    transport = setting("transport", wanted)
    raise TransportUnavailable(
        f"{transport} between rank {one.rank} ({one.hostname}) and rank {other.rank} "
        f"({other.hostname}): {'; '.join(obstacles) or 'it links no ranks'}",
        transport,
        *obstacles,
    )
