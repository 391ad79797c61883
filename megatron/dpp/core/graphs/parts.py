"""The parts of a model chunk that can be captured: its whole block, or of each layer what is before
its experts.

Experts take as many tokens as the router sends them, so their kernels cannot be captured. The
attention with its norm and residual, the norm behind it and the router can.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.moe import moe_layer, router

from megatron.dpp.core.model import decoder_block, replays_routing, routes_by_device
from megatron.dpp.core.wgrad.own_way import is_written_in, watched, why_eager

ATTEND = "_forward_attention"
"""The method of a layer that runs what is before its MLP."""


class Part(abc.ABC):
    """A function of hidden states [s, b, h] that a chunk calls. Of its outputs the first is like
    the input.

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
        self._chunk, self.owner, self._name = chunk, owner, name
        self.modules, self.pieces = modules, pieces
        self.original: Callable[..., Any] = getattr(owner, name)
        self._made_of = self._objects()

    @abc.abstractmethod
    def hidden_of(self, options: Mapping[str, Any]) -> Any:
        """The input of a call with these arguments."""

    @abc.abstractmethod
    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run the function with another input; returns its outputs."""

    def answer(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The result of a call whose outputs are these."""
        (output,) = outputs
        return output

    def around(self) -> AbstractContextManager[Any]:
        """The context in which a chunk calls the function."""
        return contextlib.nullcontext()

    def is_as_built(self) -> bool:
        """True if no host has changed the modules and parameters since."""
        now = self._objects()
        same = len(now) == len(self._made_of) and all(
            one is other for one, other in zip(now, self._made_of, strict=True)
        )
        return same and any(m is self.owner for m in decoder_block(self._chunk).modules())

    def why_eager(self) -> str | None:
        """The reason why a step cannot replay the part, as a host does more in it; or None."""
        return why_eager(self.modules)

    def bind(self, call: Callable[..., Any] | None) -> None:
        """Call this instead of the function; None restores it."""
        if call is not None:
            setattr(self.owner, self._name, call)
        else:
            delattr(self.owner, self._name)

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
        block = self.owner
        return options["hidden_states"] if block.pre_process else block.input_tensor

    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> tuple[Any, ...]:
        block, given = self.owner, self.owner.input_tensor
        block.input_tensor = hidden
        try:
            return (self.original(hidden_states=hidden if block.pre_process else None, **options),)
        finally:
            block.input_tensor = given


class BeforeExperts(Part):
    """The part of a layer before its experts: attention, norms, residual and router.

    The layer then asks its norm and its router for what was computed here. Without a router that
    can be captured it is the attention alone; beside shared experts it ends at the norm, as a graph
    would add up the three gradients of the norm's output in another order.
    """

    def __init__(self, chunk: torch.nn.Module, number: int) -> None:
        layer = decoder_block(chunk).layers[number]
        self._asked: list[Any] = []
        self._computed: dict[Any, tuple[torch.Tensor, Any]] = {}
        """What was computed of which input, by the module that will be asked for it."""
        if can_route(layer):
            beside = layer.mlp.use_shared_expert and not layer.mlp.shared_expert_overlap
            self._asked = [layer.pre_mlp_layernorm, *([] if beside else [layer.mlp.router])]
        own = _before_experts(layer)
        own = {name: each for name, each in own.items() if "mlp" not in name or each in self._asked}
        super().__init__(chunk, layer, ATTEND, torch.nn.ModuleDict(own), (number,))
        self.modules.training = layer.training

    def around(self) -> AbstractContextManager[Any]:
        config, number = self.owner.config, self.owner.layer_number - 1
        return get_fp8_context(config, number) if config.fp8 else super().around()

    def _objects(self) -> list[Any]:
        return [*_before_experts(self.owner).values(), *super()._objects()]

    def hidden_of(self, options: Mapping[str, Any]) -> Any:
        return options["hidden_states"]

    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> tuple[Any, ...]:
        output, context = self.original(hidden_states=hidden, **options)
        packed = options.get("packed_seq_params")
        if context is not None or options.get("padding_mask") is not None:
            raise TypeError("its layers take a context or a mask of padding")
        if getattr(packed, "tokens_per_sample", None) is not None:
            raise TypeError("its router takes packed rows apart")
        if not self._asked:
            return (output,)
        norm, *routers = self._asked
        normed = norm(output)
        return output, normed, *(each for routes in routers for each in routes(normed))

    def answer(self, outputs: Sequence[torch.Tensor]) -> Any:
        if self._computed:
            raise RuntimeError(
                f"a layer did not ask for all that was computed: {[*self._computed]}"
            )
        if not self._asked:
            return *outputs, None
        output, normed, *routed = outputs
        computed = (output, normed), (normed, tuple(routed))
        self._computed = dict(zip(self._asked, computed, strict=False))
        return output, None

    def bind(self, call: Callable[..., Any] | None) -> None:
        super().bind(call)
        self._computed.clear()
        for module in self._asked:
            if call is not None:
                module.forward = partial(self._ask, module, module.forward)
            else:
                del module.forward

    def _ask(self, module: Any, forward: Callable[..., Any], given: Any, *more: Any) -> Any:
        """Hand out what was computed."""
        if module not in self._computed:
            return forward(given, *more)
        known, found = self._computed.pop(module)
        if known is not given or any(each is not None for each in more):
            raise RuntimeError(
                f"{type(module).__name__} of a layer gets another input than in the layer's graph"
            )
        return found

    def why_eager(self) -> str | None:
        layer = self.owner
        if not has_own_attention(layer):
            return f"{type(layer).__name__}.{ATTEND} was replaced"
        if self._asked and not can_route(layer):
            return "its experts, or their router, were changed"
        return super().why_eager()


def _before_experts(layer: Any) -> dict[str, Any]:
    """A layer's modules without its experts, and its router."""
    found = {name: part for name, part in layer.named_children() if name != "mlp"}
    return found | {"mlp_router": getattr(layer.mlp, "router", None)}


def has_own_attention(layer: Any) -> bool:
    """True if a layer calls megatron-core's own function for its attention."""
    return _is_own(layer, transformer_layer, ATTEND)


def can_route(layer: Any) -> bool:
    """True if a layer hands its norm's output to its router as megatron-core does, and the router
    is megatron-core's own, with nothing in it that asks the device for a number or replays what was
    recorded.
    """
    config, experts, found = layer.config, layer.mlp, getattr(layer.mlp, "router", None)
    odd = replays_routing(config) or getattr(config, "mlp_chunks_for_training", 1) != 1
    if type(found) is not router.TopKRouter or odd or routes_by_device(config):
        return False
    if watched(experts, "mlp") is not None or experts._forward_pre_hooks:
        return False
    return (
        _is_own(layer, transformer_layer, "_forward_mlp")
        and _is_own(experts, moe_layer, "forward", "route")
        and _is_own(found, router, "forward", "routing", "gating")
    )


def _is_own(owner: Any, home: Any, *names: str) -> bool:
    """True if methods of a module are written in this file of megatron-core."""
    methods = (getattr(getattr(owner, name, None), "__func__", None) for name in names)
    return all(is_written_in(method, home) for method in methods)
