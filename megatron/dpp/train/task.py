"""What distinguishes one kind of pre-training from another; ``pretrain`` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.dpp.train.initialize import Run
from megatron.dpp.train.model import ChunkBuilder


@dataclass(frozen=True)
class Task:
    """A model family.

    Args:
        name: for messages.
        tokenizer_type: used when ``--tokenizer-type`` is not given.
        build_chunk: builds one bare model chunk.
        datasets: gives the data set class and its configuration.
        forward_step: gives megatron-core's ``forward_step_func`` for a run.
    """

    name: str
    tokenizer_type: str
    build_chunk: ChunkBuilder
    datasets: Callable[[Run], tuple[type, Any]]
    forward_step: Callable[[Run], Callable[..., Any]]
