"""A small chunk whose block graphs of stand-ins replay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.core.graphs import slots as graphs


class Block(torch.nn.Module):
    """The part of a transformer block that its graphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_process, self.input_tensor = True, None
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.num_eager = 0

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_eager += 1
        return self.layers[0](hidden_states) * scale


class Chunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Block()
        self.config = SimpleNamespace(
            hidden_dropout=0.0, attention_dropout=0.0, recompute_granularity=None, fp8=None
        )


@pytest.fixture(name="chunk")
def graphed_chunk(monkeypatch: pytest.MonkeyPatch) -> Chunk:
    """One that is captured in its first step."""
    monkeypatch.setattr(graphs, "why_not", lambda chunk: None)
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 0)
    return Chunk()
