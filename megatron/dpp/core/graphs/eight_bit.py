"""Weights that Transformer Engine's layers keep in 8 bit from a step's first microbatch on.

A step's first forward quantises them in place; graphs read them where they were at the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.dpp.config import EIGHT_BIT_RECIPES
from megatron.dpp.core.rng import draws_numbers

_WITHOUT_WEIGHTS = {"core_attn", "layernorm", "moe_act"}
"""Modules whose recomputation runs no layer with 8-bit weights."""


class CachedWeights:
    """The 8-bit weights of a block's layers.

    Args:
        block: with layers of Transformer Engine, in 8 bit.
    """

    def __init__(self, block: torch.nn.Module) -> None:
        self._layers: list[Any] = [
            module for module in block.modules() if hasattr(module, "is_first_microbatch")
        ]
        self._renews: bool | None = None

    @property
    def are_stale(self) -> bool:
        """True until the first forward of a step has quantised them."""
        return any(layer.is_first_microbatch for layer in self._layers)

    def addresses(self) -> list[int]:
        """Of all of their tensors."""
        return [tensor.data_ptr() for _, _, weight in self._kept() for tensor in _tensors(weight)]

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Put them back where they were if a capture has moved them: it computes nothing, so the
        tasks of this step would read what was never written.

        Raises:
            RuntimeError: it has.
        """
        layers = [(layer, dict(layer._fp8_workspaces)) for layer in self._layers]
        parts = [(weight, dict(vars(weight))) for _, _, weight in self._kept()]
        before = self.addresses()
        yield
        if self.addresses() != before:
            for layer, weights in layers:
                layer._fp8_workspaces.clear()
                layer._fp8_workspaces.update(weights)
            for weight, attributes in parts:
                vars(weight).update(attributes)
            raise RuntimeError("its 8-bit weights would move in each task")

    @torch.no_grad()
    def renew(self) -> bool:
        """Quantise them as a step's first forward does; False if that was not seen to be the same
        (:meth:`compared`).
        """
        if not self._renews:
            return False
        for layer, name, weight in self._kept():
            _quantise(getattr(layer, name), weight)
        for layer in self._layers:
            layer.is_first_microbatch = False
        return True

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Compare, once, what :meth:`renew` would make of each with what a step's first forward
        makes of it in the block.
        """
        if self._renews is None:
            before = self._quantised()
            yield
            made = [digest for _, _, weight in self._kept() for digest in _digests(weight)]
            same = len(made) == len(before) and all(map(torch.equal, made, before))
            self._renews = bool(made) and same
        else:
            yield

    @torch.no_grad()
    def _quantised(self) -> list[torch.Tensor]:
        """Digests of each when it is quantised from nothing; none where that cannot be done. They
        are left as they were, but for padding of scales, into which nothing is written: it is 0.
        """
        made: list[torch.Tensor] = []
        for layer, name, weight in self._kept():
            if not all(map(hasattr, (layer, weight, weight), (name, "quantize_", "_quantizer"))):
                return []
            kept = [(tensor, tensor.clone()) for tensor in _tensors(weight)]
            for tensor, _ in kept:
                tensor.zero_()
            _quantise(getattr(layer, name), weight)
            made += _digests(weight)
            for tensor, before in kept:
                if tensor.is_floating_point():
                    before.masked_fill_(tensor == 0, 0)
                tensor.copy_(before)
        return made

    def _kept(self) -> Iterator[tuple[Any, str, Any]]:
        """Layers, the names of their weights, and these in 8 bit."""
        for layer in self._layers:
            for name, weight in layer._fp8_workspaces.items():
                yield layer, name, weight


def tensors_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a parameter's or buffer's numbers: several if it is in 8 bit."""
    return [tensor] if type(tensor.data) is torch.Tensor else _tensors(tensor)


def _tensors(weight: Any) -> list[torch.Tensor]:
    return [tensor for tensor in vars(weight).values() if isinstance(tensor, torch.Tensor)]


def _quantise(weight: torch.Tensor, into: Any) -> None:
    into._quantizer.set_usage(rowwise=True, columnwise=True)  # an evaluation needs less
    into.quantize_(weight.detach())


def _digests(weight: Any) -> list[torch.Tensor]:
    """Scales, and sums of the rows and columns of 8-bit numbers."""
    found = []
    for tensor in _tensors(weight):
        if tensor.dtype == torch.uint8 and tensor.dim() > 1:
            found += [tensor.sum(0, dtype=torch.int64), tensor.sum(-1, dtype=torch.int64)]
        else:
            found.append(tensor.clone())
    return found


def why_not_in_8_bit(config: Any, block: torch.nn.Module) -> str | None:
    """The reason why a block in 8 or 4 bit cannot be captured; None if it can."""
    if config.fp4:
        return "4-bit layers have not been tried"
    if any(getattr(config, name, None) for name in ("quant_recipe", "use_kitchen")):
        return "layers with recipes of their own have not been tried"
    if not config.fp8:
        return None
    if config.fp8_recipe not in EIGHT_BIT_RECIPES:
        return (
            f"8-bit layers of the recipe {config.fp8_recipe} were not tried; "
            f"{', '.join(EIGHT_BIT_RECIPES)} can be captured"
        )
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        return "attention in 8 bit has not been tried"
    if again := _recomputed(config):
        if config.fp8_recipe == "delayed":
            return f"{again} takes delayed scales from the host's queue of microbatches"
        if draws_numbers(config):
            return f"{again} draws again what it dropped, by states that no graph can restore"
        if not config.disable_parameter_transpose_cache:
            # The forward without gradients drops their transposes, and B's makes new weights.
            return f"{again} moves their 8-bit weights in each task"
    layers = (layer for layer in block.modules() if hasattr(layer, "is_first_microbatch"))
    known = all(isinstance(getattr(layer, "_fp8_workspaces", None), dict) for layer in layers)
    if known or config.disable_parameter_transpose_cache:
        return None
    return "this version of Transformer Engine keeps 8-bit weights where they are not known"


def _recomputed(config: Any) -> str:
    """The setting by which layers with 8-bit weights run again in a backward; empty without."""
    granularity = config.recompute_granularity
    again = set(config.recompute_modules or ()) - _WITHOUT_WEIGHTS
    if granularity == "full":
        return "recompute_granularity='full'"
    named = granularity == "selective" and ", ".join(sorted(again))
    return f"recompute_granularity='selective' of {named}" if named else ""
