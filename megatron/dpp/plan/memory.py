"""What each pipeline rank holds: weights, gradients, optimizer state, activations.

The number of microbatches in flight is not a formula here: the schedule that will run is simulated
with the sizes of its stages, so interleaving, caps and deferred weight gradients are counted as
they happen, and with what training measures of them: the share that ``B`` frees, the room that the
last rank leaves to the LM head. An activation lives from its forward to its backward, which leaves
the inputs and the output gradients of the linear layers until their ``W``, one layer at a time.
CUDA graphs keep more: a slot for each activation that the cap allows, as large as the rank's
largest chunk, for as long as the run lasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.plan.activations import stage_bytes, workspace_bytes
from megatron.dpp.plan.parameters import layer_parameters, rank_parameters
from megatron.dpp.plan.shape import RunShape

_MASTER = 4
"""Bytes of a parameter's fp32 copy where the parameter itself has 16 bits."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage holds at its worst moment.

    Args:
        activations: kept by forwards for their backwards.
        workspace: what a backward holds beside them, and gathered parameters.
    """

    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def state(self) -> float:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything."""
        return self.state + self.activations + self.workspace


def rank_memory(shape: RunShape, rank: int, activations: float) -> RankMemory:
    """The memory of pipeline rank ``rank`` when its activations take ``activations`` bytes."""
    count = rank_parameters(shape, rank)
    own = count / shape.sharers
    optimizer = shape.moment_bytes + (_MASTER if shape.element_bytes == 2 else 0)
    held: float = count
    gathered = 0.0
    if shape.shard in ("gradients", "parameters"):
        gathered, held = _gathered(shape, count), own
    return RankMemory(
        parameters=count,
        weights=held * shape.element_bytes,
        gradients=held * shape.gradient_bytes,
        optimizer=own * optimizer,
        activations=activations,
        workspace=workspace_bytes(shape, rank) + gathered,
    )


def least_bytes(shape: RunShape) -> float:
    """What the fullest rank holds whatever the schedule: rank ``r`` of ``p`` runs ``p - r``
    forwards before the first gradient comes back to it. Needs no simulation, so it answers for a
    model of any size.
    """
    return max(
        rank_memory(shape, rank, _first_forwards_bytes(shape, rank)).total
        for rank in range(shape.pipeline)
    )


def _first_forwards_bytes(shape: RunShape, rank: int) -> float:
    stages = range(rank, len(shape.layers), shape.pipeline)
    held = sum(stage_bytes(shape, stage) for stage in stages)
    return min(shape.num_microbatches, shape.pipeline - rank) * held


def _gathered(shape: RunShape, count: int) -> float:
    """Parameters that FSDP2 has gathered at once, and the gradients of one of its units.

    Stage 2 gathers all of them; stage 3 the root's (embeddings, head) and two layers'.
    """
    layer = layer_parameters(shape)
    root = count - shape.num_layers * layer
    whole = count if shape.shard == "gradients" else root + 2 * layer
    return float((whole + layer) * shape.element_bytes)
