"""Layers that keep their weights in 8 bit, replayed. Captured functions are run again, without a
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad.own_way import STANDS_FOR
from tests.runtime.graphed import SHAPE, Chunk, graphs_of, step
from tests.runtime.losses import Rerun

pytestmark = pytest.mark.usefixtures("captured_at_once")


class Quantised:
    """Eighths of a weight, as whole numbers, and a scale with padding of no value.

    Args:
        renews: whether it can do that by itself, as the package's tensors do: ``yes``, ``no``, or
            ``wrong`` if it makes something else.
    """

    def __init__(self, renews: str) -> None:
        self.data = torch.zeros((4, 4), dtype=torch.uint8)
        self.padded = torch.tensor([0.0, math.nan])
        self.scale = self.padded[:1]
        self._quantizer = SimpleNamespace(set_usage=lambda *, rowwise, columnwise: None)
        if renews != "no":
            self.quantize_ = self.take if renews == "yes" else self.take_transposed

    def take(self, weight: torch.Tensor) -> None:
        self.data.copy_((weight * 8).round())
        self.scale.fill_(1 / 8)

    def take_transposed(self, weight: torch.Tensor) -> None:
        self.take(weight.t())


class EightBit(torch.nn.Linear):
    """Keeps its weights in 8 bit from a step's first microbatch on, as layers of Transformer Engine
    do.
    """

    moves = False
    """Whether a capture makes new ones, as a recomputation does, and computes nothing."""

    def __init__(self, renews: str) -> None:
        super().__init__(4, 4, bias=False)
        self.is_first_microbatch, self.renews, self.num_first = True, renews, 0
        self._fp8_workspaces: dict[str, Quantised] = {}
        with torch.no_grad():
            self.weight.copy_(torch.arange(16.0).view(4, 4) / 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = self._fp8_workspaces.setdefault("weight", Quantised(self.renews))
        if self.is_first_microbatch:
            self.num_first += 1
            kept.take(self.weight.detach())
        self.is_first_microbatch = False
        if self.moves and hasattr(self.weight, STANDS_FOR):
            self._fp8_workspaces["weight"] = Quantised(self.renews)
        return torch.nn.functional.linear(hidden, kept.data * kept.scale + 0 * self.weight)


def eight_bit_chunk(renews: str) -> tuple[EightBit, Chunk]:
    layer, chunk = EightBit(renews), Chunk()
    chunk.decoder.layers = torch.nn.ModuleList([layer])
    chunk.config.fp8, chunk.config.disable_parameter_transpose_cache = "hybrid", False
    chunk.config.fp8_param = False
    return layer, chunk


@pytest.mark.parametrize(("renews", "num_first"), [("yes", 2), ("no", 4), ("wrong", 4)])
def test_8_bit_weights_are_quantised_once_a_step_and_read_by_replays(
    renews: str, num_first: int
) -> None:
    """A forward does it, until the weights were seen to be made alike without one. Graphs would
    read what is not theirs any more if anything else had moved them.
    """
    layer, chunk = eight_bit_chunk(renews)
    made, said = graphs_of(chunk)

    def check() -> None:
        """The gradients of three microbatches after an update are by the new weights."""
        with torch.no_grad():
            layer.weight += 1.0
        layer.is_first_microbatch = True
        expected = layer.weight.detach().sum(0).expand(SHAPE)
        assert all(torch.equal(step(made, chunk)[0], expected) for _ in range(3))

    for _ in range(4):
        check()
    assert made.replays and made.inspect() and "moved" not in "".join(said)
    assert layer.num_first == num_first
    layer._fp8_workspaces.clear()
    check()
    assert not made.inspect() and "8-bit weights have moved" in said[-1]


def test_8_bit_weights_that_a_capture_would_move_stay() -> None:
    """The first microbatch's backward would have read new ones, into which nothing was written."""
    layer, chunk = eight_bit_chunk("yes")
    layer.moves = True

    class Captured(Rerun):
        """Runs the function at once, too, as a capture does."""

        def __init__(self, function: Callable[[], None], pool: Any) -> None:
            super().__init__(function, pool)
            with torch.enable_grad():
                function()

    made, said = graphs_of(chunk, capture=Captured)
    expected = layer.weight.detach().sum(0).expand(SHAPE)
    step(made, chunk)
    assert torch.equal(step(made, chunk)[0], expected)
    assert "8-bit weights would move" in said[-1]
