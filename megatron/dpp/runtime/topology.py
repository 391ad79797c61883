"""A rank's place in the pipeline, and the channels that follow from it.

Virtual stage ``s = chunk * p + rank``, as Megatron numbers them. Stage s sends its output forward
to stage s + 1 and the gradient of its input backward to stage s - 1; each pair of neighbouring
stages has one channel per direction, named after the chunk on the receiving rank. A boundary of
several tensors sends one message per tensor over its channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Geometry
from megatron.dpp.transport.base import ChannelSpec


@dataclass(frozen=True)
class Topology:
    """A rank's place in one pipeline.

    Args:
        ranks: global ranks of the pipeline, in pipeline order.
        rank: this process's index in ``ranks``.
        num_chunks: model chunks per rank.
    """

    ranks: tuple[int, ...]
    rank: int
    num_chunks: int

    @property
    def num_ranks(self) -> int:
        """Pipeline size p."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Virtual stages in all: p * v."""
        return self.num_ranks * self.num_chunks

    def stage(self, chunk: int) -> int:
        """Virtual stage number of one of this rank's chunks."""
        return chunk * self.num_ranks + self.rank

    def geometry(self, num_microbatches: int, **more: Any) -> Geometry:
        """An iteration as schedules see it on this rank; ``more`` as in :class:`Geometry`."""
        return Geometry(self.num_ranks, self.rank, self.num_chunks, num_microbatches, **more)

    def channels(self, receives: Sequence[int], sends: Sequence[int], depth: int) -> Channels:
        """The channels that begin or end here, and which task each of them serves.

        Args:
            receives: bytes of each tensor that a chunk is given by the stage before it.
            sends: bytes of each tensor that a chunk hands to the stage after it.
            depth: microbatches for which a receiver has room.

        Raises:
            ConfigError: this rank is its own neighbour and sends what it would not receive.
        """
        specs: list[ChannelSpec] = []
        own = self.ranks[self.rank]
        if self.num_ranks == 1 and self.num_chunks > 1 and tuple(receives) != tuple(sends):
            raise ConfigError(
                f"rank {own} is its own neighbour: its chunks send tensors of {tuple(sends)} bytes "
                f"and would receive {tuple(receives)} (adjust_tensor_shapes_fn)"
            )
        for stage in range(self.num_stages - 1):
            here, there = self._at(stage), self._at(stage + 1)
            tensors = sends if here[0] == own else receives
            room = (max(tensors), depth * len(tensors))
            for sender, receiver, way in (
                (here, there, Direction.FORWARD),
                (there, here, Direction.BACKWARD),
            ):
                if own in (sender[0], receiver[0]):
                    specs.append(ChannelSpec(sender[0], receiver[0], receiver[1], way, *room))
        return Channels(self, tuple(specs), len(receives), len(sends))

    def _at(self, stage: int) -> tuple[int, int]:
        """(global rank, chunk) of a virtual stage."""
        return self.ranks[stage % self.num_ranks], stage // self.num_ranks


class Channels:
    """A rank's channels, and the maps between them and (direction, chunk) of its own tasks."""

    def __init__(
        self,
        topology: Topology,
        specs: tuple[ChannelSpec, ...],
        num_received: int = 1,
        num_sent: int = 1,
    ) -> None:
        own = topology.ranks[topology.rank]
        self.specs = specs
        self._num_before, self._num_after = num_received, num_sent
        self._topology = topology
        self._outgoing = [spec for spec in specs if spec.source == own]
        self._incoming = [spec for spec in specs if spec.destination == own]

    def bind(self, outgoing: Sequence[ChannelSpec], incoming: Sequence[ChannelSpec]) -> None:
        """Take over the order in which an opened transport lists the channels."""
        self._outgoing, self._incoming = list(outgoing), list(incoming)
        self.receiving = [(spec.direction, spec.chunk) for spec in self._incoming]
        self._index_of = {key: index for index, key in enumerate(self.receiving)}
        self._sending = {
            (spec.direction, self._own_chunk(spec)): index
            for index, spec in enumerate(self._outgoing)
        }
        before, after = self._num_before, self._num_after
        forward = Direction.FORWARD
        self.tensors_in = [before if s.direction == forward else after for s in self._incoming]
        """Messages per microbatch on each incoming channel: tensors of the boundary that it comes
        from.
        """
        self.tensors_out = [after if s.direction == forward else before for s in self._outgoing]
        """Messages per microbatch on each outgoing channel."""

    @property
    def num_incoming(self) -> int:
        """Channels that end at this rank."""
        return len(self._incoming)

    def incoming(self, direction: Direction, chunk: int) -> int | None:
        """Index of the channel that feeds a task of ``chunk``; None where the task needs no
        message.
        """
        return self._index_of.get((direction, chunk))

    def outgoing(self, direction: Direction, chunk: int) -> int | None:
        """Index of the channel that takes the result of ``chunk``; None at the ends of the
        pipeline.
        """
        return self._sending.get((direction, chunk))

    def spec_in(self, index: int) -> ChannelSpec:
        """The incoming channel with this index."""
        return self._incoming[index]

    def spec_out(self, index: int) -> ChannelSpec:
        """The outgoing channel with this index."""
        return self._outgoing[index]

    def _own_chunk(self, spec: ChannelSpec) -> int:
        """The sending chunk of one of this rank's outgoing channels."""
        topology = self._topology
        receiver = spec.chunk * topology.num_ranks + topology.ranks.index(spec.destination)
        step = 1 if spec.direction is Direction.FORWARD else -1
        return (receiver - step) // topology.num_ranks
