"""Layers that keep their weights in 8 bit, replayed. Captured functions are run again, without a
GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.core.graphs import slots
from tests.runtime.test_graphs import SHAPE, Chunk, graphs_of, step


class Quantised:
    """Eighths of a weight, as whole numbers; ``renews`` by itself, as the package's tensors do."""

    def __init__(self, *, renews: bool) -> None:
        self.data = torch.full((4, 4), torch.nan)
        self._quantizer = SimpleNamespace(set_usage=lambda *, rowwise, columnwise: None)
        if renews:
            self.quantize_ = self.take

    def take(self, weight: torch.Tensor) -> None:
        self.data.copy_((weight * 8).round())


class EightBit(torch.nn.Linear):
    """Keeps its weights in 8 bit from a step's first microbatch on, as layers of Transformer Engine
    do.
    """

    def __init__(self, *, renews: bool) -> None:
        super().__init__(4, 4, bias=False)
        self.is_first_microbatch, self.renews, self.num_first = True, renews, 0
        self._fp8_workspaces: dict[str, Quantised] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = self._fp8_workspaces.setdefault("weight", Quantised(renews=self.renews))
        if self.is_first_microbatch:
            self.num_first += 1
            kept.take(self.weight.detach())
        self.is_first_microbatch = False
        return torch.nn.functional.linear(hidden, kept.data + 0 * self.weight)


@pytest.mark.parametrize("renews", [True, False])
def test_8_bit_weights_are_quantised_once_a_step_and_read_by_replays(
    renews: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs would read what is not theirs any more if anything else had moved them."""
    monkeypatch.setattr(slots, "why_not", lambda chunk: None)
    monkeypatch.setattr(slots, "WARM_UP_STEPS", 0)
    layer, chunk = EightBit(renews=renews), Chunk()
    chunk.decoder.layers = torch.nn.ModuleList([layer])
    chunk.config.fp8, chunk.config.disable_parameter_transpose_cache = "hybrid", False
    made, said = graphs_of(chunk)

    def gradients() -> list[torch.Tensor]:
        """Of the inputs of three microbatches, after an update of the weights."""
        with torch.no_grad():
            layer.weight += 1.0
        layer.is_first_microbatch = True
        return [step(made, chunk) for _ in range(3)]

    gradients()
    found = gradients()
    assert made.replays and made.inspect() and "moved" not in "".join(said)
    assert layer.num_first == (1 if renews else 2)
    expected = (layer.weight.detach() * 8).round().sum(0).expand(SHAPE)
    assert all(torch.equal(each, expected) for each in found)
    layer._fp8_workspaces.clear()
    assert all(torch.equal(each, expected + 4 * 8.0) for each in gradients())
    assert not made.inspect() and "8-bit weights have moved" in said[-1]
