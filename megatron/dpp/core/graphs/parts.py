"""The parts of a model chunk that can be captured: its whole block, or the attention of each layer.

Experts take as many tokens as the router sends them, so their kernels cannot be captured. What is
before them in a layer can: the norm, the attention and the addition to the residual.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.dpp.core.model import decoder_block
from megatron.dpp.core.wgrad.own_way import is_written_in, why_eager

ATTEND = "_forward_attention"
"""The method of a layer that runs what is before its MLP."""
_OF_EXPERTS = {"pre_mlp_layernorm", "mlp", "mlp_bda"}
"""Submodules of a layer that run behind its attention."""


class Part(abc.ABC):
    """A function of hidden states, [s, b, h] -> [s, b, h], that a chunk calls.

    Args:
        chunk: the model chunk.
        owner: the module with the function, by name, which a step replaces there.
        modules: the module whose parameters it uses.
        pieces: its layers, counted from the chunk's first, the last one first.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        owner: Any,
        name: str,
        modules: torch.nn.Module,
        pieces: Sequence[int],
    ) -> None:
        self._chunk, self._owner, self._name = chunk, owner, name
        self.modules, self.pieces = modules, pieces
        self.original: Callable[..., Any] = getattr(owner, name)
        self._made_of = self._objects()

    @abc.abstractmethod
    def hidden_of(self, options: Mapping[str, Any]) -> Any:
        """The input of a call with these arguments."""

    @abc.abstractmethod
    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Run the function with another input; returns its output."""

    def answer(self, output: torch.Tensor) -> Any:
        """The result of a call whose output is this."""
        return output

    @property
    def trains(self) -> bool:
        """The part is in training mode."""
        return bool(self._owner.training)

    @abc.abstractmethod
    def is_there(self, block: Any) -> bool:
        """True if the chunk's block, ``block`` now, still has this part."""

    def is_as_built(self) -> bool:
        """True if no host has changed the modules and parameters since."""
        now = self._objects()
        same = len(now) == len(self._made_of) and all(
            one is other for one, other in zip(now, self._made_of, strict=True)
        )
        return same and self.is_there(decoder_block(self._chunk))

    def why_eager(self) -> str | None:
        """The reason why a step cannot replay the part, as a host does more in it; or None."""
        return why_eager(self.modules)

    def bind(self, call: Callable[..., Any] | None) -> None:
        """Call this instead of the function; None restores it."""
        if call is not None:
            setattr(self._owner, self._name, call)
        else:
            delattr(self._owner, self._name)

    def _objects(self) -> list[Any]:
        """The objects that a capture depends on."""
        objects: list[Any] = []
        for module in self.modules.modules():
            objects += (module, type(module), module.training)
            for parameter in module._parameters.values():
                objects += (parameter, parameter is not None and parameter.requires_grad)
        return objects


class Whole(Part):
    """A chunk's transformer block."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        block = decoder_block(chunk)
        pieces = range(len(block.layers) - 1, -1, -1)
        super().__init__(chunk, block, "forward", block, pieces)

    def hidden_of(self, options: Mapping[str, Any]) -> Any:
        block = self._owner
        return options["hidden_states"] if block.pre_process else block.input_tensor

    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> Any:
        block, given = self._owner, self._owner.input_tensor
        block.input_tensor = hidden
        try:
            return self.original(hidden_states=hidden if block.pre_process else None, **options)
        finally:
            block.input_tensor = given

    def is_there(self, block: Any) -> bool:
        return block is self._owner


class Attention(Part):
    """The attention of a layer, with its norm and residual."""

    def __init__(self, chunk: torch.nn.Module, number: int) -> None:
        layer = decoder_block(chunk).layers[number]
        own = {name: part for name, part in layer.named_children() if name not in _OF_EXPERTS}
        super().__init__(chunk, layer, ATTEND, torch.nn.ModuleDict(own), (number,))
        self.modules.training = layer.training

    def hidden_of(self, options: Mapping[str, Any]) -> Any:
        return options["hidden_states"]

    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> Any:
        output, context = self.original(hidden_states=hidden, **options)
        return output if context is None else None

    def answer(self, output: torch.Tensor) -> Any:
        return output, None

    def is_there(self, block: Any) -> bool:
        return any(layer is self._owner for layer in block.layers)

    def why_eager(self) -> str | None:
        if ATTEND in vars(self._owner) or not has_own_attention(self._owner):
            return f"{type(self._owner).__name__}.{ATTEND} was replaced"
        return super().why_eager()


def has_own_attention(layer: Any) -> bool:
    """True if a layer calls megatron-core's own function for its attention."""
    function, home = getattr(type(layer), ATTEND, None), sys.modules[TransformerLayer.__module__]
    return function is getattr(TransformerLayer, ATTEND) and is_written_in(function, home)
