"""Weights that Transformer Engine's layers keep in 8 bit from a step's first microbatch on.

A step's first forward quantises them in place; graphs read them where they were at the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

RECIPES = ("tensorwise", "blockwise")
"""Recipes whose scales are computed anew in each task, so that a graph computes them, too."""


class CachedWeights:
    """The 8-bit weights of a block's layers.

    Args:
        block: with layers of Transformer Engine, in 8 bit.
    """

    def __init__(self, block: torch.nn.Module) -> None:
        self._layers: list[Any] = [
            module for module in block.modules() if hasattr(module, "is_first_microbatch")
        ]

    @property
    def are_stale(self) -> bool:
        """True until the first forward of a step has quantised them."""
        return any(layer.is_first_microbatch for layer in self._layers)

    def addresses(self) -> list[int]:
        """Of all of their tensors."""
        kept = [tensor for _, _, weight in self._kept() for tensor in vars(weight).values()]
        return [tensor.data_ptr() for tensor in kept if isinstance(tensor, torch.Tensor)]

    @torch.no_grad()
    def renew(self) -> bool:
        """Quantise them as a step's first forward does; False if a layer has another way."""
        pairs: list[tuple[Any, Any]] = [
            (getattr(layer, name, None), weight) for layer, name, weight in self._kept()
        ]
        if not all(isinstance(own, torch.Tensor) and hasattr(w, "quantize_") for own, w in pairs):
            return False
        for own, weight in pairs:
            weight._quantizer.set_usage(rowwise=True, columnwise=True)  # an evaluation needs less
            weight.quantize_(own.detach())
        for layer in self._layers:
            layer.is_first_microbatch = False
        return True

    def _kept(self) -> Iterator[tuple[Any, str, Any]]:
        """Layers, the names of their weights, and these in 8 bit."""
        for layer in self._layers:
            for name, weight in getattr(layer, "_fp8_workspaces", {}).items():
                yield layer, name, weight


def why_not(config: Any, block: torch.nn.Module) -> str | None:
    """The reason why a block in 8 or 4 bit cannot be captured; None if it can."""
    if config.fp4:
        return "4-bit layers have not been tried"
    if not config.fp8:
        return None
    if config.fp8_recipe not in RECIPES:
        return (
            f"8-bit layers of the recipe {config.fp8_recipe} keep scales from task to task, or "
            f"were not tried; {' and '.join(RECIPES)} can be captured"
        )
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        return "attention in 8 bit has not been tried"
    if any(type(p.data) is not torch.Tensor for p in block.parameters()):
        return "its weights are 8-bit parameters"
    return None
