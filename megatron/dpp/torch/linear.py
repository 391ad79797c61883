"""Weight gradients of plain ``nn.Linear`` layers, apart from the gradients of their inputs.

The stage before waits for the gradient of a layer's input, and nobody but the optimizer for that of
its weight. B computes the former here and keeps the operands of the latter, which W multiplies as
autograd would: the numbers are those of a fused backward. All other gradients are B's.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megatron.dpp.errors import ConfigError, setting

_MOST_PIECES = 8
"""Of a stage's weight gradients, each a task of its own."""
_LEAST_SHARE = 0.1
"""Share of trained weights in a stage's linear layers from which they are worth a task."""

_Operands = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""A weight, its layer's input [n, in] and the gradient of its output [n, out]."""


class WeightGradients:
    """The deferred weight gradients of one rank's stages.

    Args:
        modules: of the stages, in the order of their chunks.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._layers = [_pieces(module) for module in modules]
        self.num_pieces = tuple(map(len, self._layers))
        """Pieces of each chunk's W; 0 where nothing is deferred."""
        self.held_bytes = 0
        """Memory of the operands that wait."""
        self._current: dict[int, list[_Operands]] | None = None
        self._waiting: dict[tuple[int, int], dict[int, list[_Operands]]] = {}

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Let the layers' backwards defer in the block."""
        bound = [
            (layer, piece)
            for pieces in self._layers
            for piece, layers in enumerate(pieces)
            for layer in layers
        ]
        try:
            for layer, piece in bound:
                layer.forward = partial(self._forward, layer, piece)  # type: ignore[method-assign]
            yield
        finally:
            for layer, _ in bound:
                vars(layer).pop("forward", None)
            self._waiting.clear()

    def _forward(self, layer: nn.Linear, piece: int, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        wanted = x.requires_grad or (layer.bias is not None and layer.bias.requires_grad)
        plain = type(x) is torch.Tensor and x.dim() > 1 and x.is_contiguous()
        if (
            not (plain and wanted and weight.requires_grad and torch.is_grad_enabled())
            or torch.is_autocast_enabled(x.device.type)
            or weight._backward_hooks
            or weight._post_accumulate_grad_hooks
        ):
            return nn.functional.linear(x, weight, layer.bias)
        return _Product.apply(x, layer.bias, (weight, piece, self))  # type: ignore[no-any-return, no-untyped-call]

    def defer(self, piece: int, operands: _Operands) -> None:
        """Keep what a weight gradient is computed from.

        Raises:
            ConfigError: the pass is none of the pipeline's.
        """
        if self._current is None:
            split, off = setting("split_backward"), setting("split_backward", "off")
            raise ConfigError(
                f"{split}: a forward runs a backward pass of its own, whose weight gradients would "
                f"be deferred; use {off}",
                split,
                off,
            )
        self._current[piece].append(operands)
        self.held_bytes += operands[2].nbytes

    @contextlib.contextmanager
    def collect(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Assign what the backward in the block defers to (chunk, microbatch)."""
        self._current = self._waiting[chunk, microbatch] = defaultdict(list)
        try:
            yield
        finally:
            self._current = None

    @torch.no_grad()
    def run(self, chunk: int, microbatch: int, piece: int) -> None:
        """Compute one piece of W."""
        waiting = self._waiting[chunk, microbatch]
        for weight, x, gradient in waiting.pop(piece, ()):
            self.held_bytes -= gradient.nbytes
            found = gradient.t().mm(x)
            if weight.grad is None:
                weight.grad = found
            else:
                weight.grad += found
        if piece == self.num_pieces[chunk] - 1:
            del self._waiting[chunk, microbatch]


class _Product(torch.autograd.Function):
    """``nn.functional.linear`` whose backward defers the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        deferred: tuple[nn.Parameter, int, WeightGradients],
    ) -> torch.Tensor:
        weight, ctx.piece, ctx.store = deferred
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_bias, _ = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.store.defer(ctx.piece, (weight, x.detach().view(-1, x.shape[-1]), flat))
        return (
            flat.mm(weight).view(x.shape) if wants_x else None,
            flat.sum(0) if wants_bias else None,
            None,
        )


def _pieces(module: nn.Module) -> list[list[nn.Linear]]:
    """The layers of a stage that defer, by piece, the last ones first."""
    parts = list(module.modules())
    wrapped = isinstance(module, DistributedDataParallel | FSDPModule)
    if wrapped or any(getattr(part, "_compiled_call_impl", None) for part in parts):
        return []
    uses = Counter(id(p) for part in parts for p in part._parameters.values() if p is not None)
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    layers = [
        layer
        for layer in linear
        if type(layer).forward is nn.Linear.forward
        and "forward" not in vars(layer)
        and type(layer.weight) is nn.Parameter
        and layer.weight.requires_grad
        and uses[id(layer.weight)] == 1
    ][::-1]
    trained, both = (sum(each.weight.numel() for each in some) for some in (layers, linear))
    if not layers or trained < _LEAST_SHARE * both:
        return []
    number = min(_MOST_PIECES, len(layers))
    return [
        layers[len(layers) * i // number : len(layers) * (i + 1) // number] for i in range(number)
    ]
