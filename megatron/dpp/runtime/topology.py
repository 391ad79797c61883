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

    def channels(
        self, receives: Sequence[int], sends: Sequence[int], depth: int
    ) -> tuple[ChannelSpec, ...]:
        """The channels that begin or end here.

        Args:
            receives: bytes of each tensor that a chunk is given by the stage before it.
            sends: bytes of each tensor that a chunk hands to the stage after it.
            depth: microbatches for which a receiver has room.
        """
        specs: list[ChannelSpec] = []
        own = self.ranks[self.rank]
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
        return tuple(specs)

    def sending_chunk(self, spec: ChannelSpec) -> int:
        """The chunk whose results leave on one of this rank's outgoing channels."""
        receiver = spec.chunk * self.num_ranks + self.ranks.index(spec.destination)
        return (receiver - (1 if spec.direction is Direction.FORWARD else -1)) // self.num_ranks

    def _at(self, stage: int) -> tuple[int, int]:
        """(global rank, chunk) of a virtual stage."""
        return self.ranks[stage % self.num_ranks], stage // self.num_ranks
