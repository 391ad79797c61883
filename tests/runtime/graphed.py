"""A small chunk whose block graphs of stand-ins replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron.dpp.core.graphs import slots as graphs
from tests.runtime.losses import Rerun

SHAPE = (3, 2, 4)


class Block(torch.nn.Module):
    """The part of a transformer block that its graphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_process, self.input_tensor = True, None
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.num_eager = 0

    def forward(
        self, hidden_states: torch.Tensor, scale: Any = 1.0, packed_seq_params: Any = None
    ) -> torch.Tensor:
        self.num_eager += 1
        if packed_seq_params is not None:
            scale = packed_seq_params.cu_seqlens_q[1]
        return self.layers[0](hidden_states) * scale


class Chunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Block()
        self.config = SimpleNamespace(
            hidden_dropout=0.0,
            attention_dropout=0.0,
            recompute_granularity=None,
            fp8=None,
            num_moe_experts=None,
            sequence_parallel=False,
            context_parallel_size=1,
        )


class Captures:
    """Captures of stand-ins, which are counted, and their replays."""

    def __init__(self) -> None:
        self.number = 0
        self.replays: list[Rerun] = []

    def __call__(self, function: Any, pool: Any) -> Rerun:
        self.number += 1
        return Rerun(function, pool, replays=self.replays)


def graphs_of(
    *chunks: torch.nn.Module, capture: Callable[..., Any] | None = Rerun, rows: Sequence[int] = (),
    most: Callable[[], float] | None = None, store: Any = None,
) -> tuple[graphs.ChunkGraphs, list[str]]:  # fmt: skip
    """Graphs of these chunks, and what they say."""
    said: list[str] = []
    made = graphs.ChunkGraphs(
        list(chunks), store, said.append, lambda chunks: True, capture, rows=rows, most=most
    )
    return made, said


def step(
    made: graphs.ChunkGraphs, *chunks: Any, lengths: Sequence[int] = (), longest: int = SHAPE[0],
    **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """One step of microbatches through these chunks, all in flight at once; the gradients of their
    inputs.
    """
    inputs = [
        torch.arange(8.0 * rows).reshape(rows, *SHAPE[1:]).requires_grad_()
        for rows in lengths or [longest] * len(chunks)
    ]
    with made.bound(torch.empty(longest, *SHAPE[1:])):
        outputs = [
            each.decoder(hidden_states=hidden, **options)
            for each, hidden in zip(chunks * (len(inputs) // len(chunks)), inputs, strict=True)
        ]
        for output in outputs:
            output.sum().backward()
    gradients = [hidden.grad for hidden in inputs]
    assert all(gradient is not None for gradient in gradients)
    return gradients  # type: ignore[return-value]
