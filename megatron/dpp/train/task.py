"""What distinguishes one kind of pre-training from another; ``pretrain`` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.dpp.train.initialize import Run
    from megatron.dpp.train.model import ChunkBuilder


@dataclass(frozen=True)
class Task:
    """A model family.

    Args:
        build_chunk: builds one bare model chunk.
        datasets: gives the data set class and its configuration.
        forward_step: gives megatron-core's ``forward_step_func`` for a run.
        every_stage_reads: stages in the middle of the pipeline need batches too.
    """

    build_chunk: ChunkBuilder
    datasets: Callable[[Run], tuple[type, Any]]
    forward_step: Callable[[Run], Callable[..., Any]]
    every_stage_reads: bool = False
