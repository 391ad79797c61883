"""megatron-core's own parallel linear layers, whose weight gradients wait for a W."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.dpp.core.wgrad import fused as fused_wgrad
from megatron.dpp.core.wgrad.accumulate import is_hooked
from megatron.dpp.core.wgrad.deferrable import (
    NODE,
    Deferrable,
    Kept,
    LayerWork,
    refuse,
    wants_leaves,
)
from megatron.dpp.core.wgrad.own_way import product_is_own, stands_for, why_module, why_weight

KINDS: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear)


class _Operands(NamedTuple):
    """Of one weight gradient: [s(/tp), b, in] and [s, b, out]."""

    input: Kept
    grad_output: Kept
    gather_group: torch.distributed.ProcessGroup | None

    @property
    def num_bytes(self) -> int:
        return self.input.num_bytes + self.grad_output.num_bytes


class Layer(Deferrable):
    """A linear layer of megatron-core's."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.weight: torch.nn.Parameter = self.module.weight
        self.weights = [self.weight]
        self.fused = bool(self.module.gradient_accumulation_fusion)

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        return isinstance(module, KINDS)

    @staticmethod
    def why_not(module: Any, uses: Callable[[torch.Tensor], int]) -> str | None:
        weight = module._parameters.get("weight")
        given = weight is None and vars(module).get("weight", module) is None  # one in each call
        if given or (weight is not None and not weight.requires_grad):
            return ""
        return why_module(module, KINDS) or why_weight(module, uses)

    @contextmanager
    def bound(self) -> Iterator[None]:
        self.module._forward_impl = self._forward
        try:
            yield
        finally:
            vars(self.module).pop("_forward_impl", None)

    def _forward(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if not self.defers(self._why_not(input, weight, options)):
            own = type(self.module)._forward_impl
            return own(self.module, input, weight, **options)  # type: ignore[no-any-return]
        group = options["tp_group"]
        gathered_over = group if options["sequence_parallel"] else None
        output: torch.Tensor = InputGradientNow.apply(  # type: ignore[no-untyped-call]
            input, options["bias"], NODE, (weight,), self, options["allreduce_dgrad"],
            gathered_over, group,
        )  # fmt: skip
        return output

    def _why_not(
        self, input_: torch.Tensor, weight: torch.Tensor, options: Mapping[str, Any]
    ) -> str | None:
        """The reason why a call does not defer: "" if there is nothing to tell, None if it does."""
        if not (torch.is_grad_enabled() and weight.requires_grad) or torch.compiler.is_compiling():
            return ""
        if not (input_.requires_grad or _wants(options["bias"])):
            return ""  # all layers before it are frozen: none waits for its B
        if options.get("output_dtype"):
            return ""
        if not stands_for(weight, self.weight):
            return "a call gets another weight"
        if is_hooked(self.weight):
            return "its weight has hooks"
        if type(input_) is not torch.Tensor:
            return f"its input is a {type(input_).__name__}"
        if torch.is_autocast_enabled(input_.device.type):
            return "autocast is on"
        return None if product_is_own() else "megatron-core's product is replaced in a call"


def _wants(bias: torch.Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


class _Deferred(LayerWork["Layer", _Operands]):
    @torch.no_grad()
    def compute(self) -> None:
        layer = self.layer
        gradients: list[torch.Tensor] = []
        for each in self.products:
            total_input = _gather(each.input.get(layer.name), each.gather_group)
            grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
                each.grad_output.get(layer.name), total_input
            )
            if layer.fused:
                fused_wgrad.accumulate(layer.weight, total_input, grad_output)
            else:
                added = grad_output.t().matmul(total_input)
                gradients = [gradients.pop() + added if gradients else added]
                del added
        layer.store.add(layer.weight, gradients)


class InputGradientNow(torch.autograd.Function):
    """``input @ weight.T + bias`` whose backward defers the weight gradient to the layer's store.

    The weight is no input of the autograd graph: otherwise autograd would run its gradient
    accumulator, and DDP's hook, before its gradient exists. ``NODE`` of
    :mod:`~megatron.dpp.core.experts` stands in its place, and tells if a pass accumulates
    gradients of leaves at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        bias: torch.Tensor | None,
        node: torch.Tensor,
        weights: tuple[torch.Tensor],
        layer: Layer,
        allreduce_dgrad: bool,
        gather_group: torch.distributed.ProcessGroup | None,
        tp_group: torch.distributed.ProcessGroup | None,
    ) -> torch.Tensor:
        (weight,) = weights  # a tensor would be an input of the graph
        ctx.save_for_backward(input_, weight)
        ctx.layer, ctx.allreduce_dgrad = layer, allreduce_dgrad
        ctx.gather_group, ctx.tp_group, ctx.has_bias = gather_group, tp_group, bias is not None
        output = torch.matmul(_gather(input_, gather_group), weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        input_, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        handle = None
        if ctx.allreduce_dgrad:
            handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        if ctx.gather_group is not None:
            scattered = torch.empty_like(input_)
            handle = torch.distributed.reduce_scatter_tensor(
                scattered, grad_input, group=ctx.gather_group, async_op=True
            )
        layer: Layer = ctx.layer
        if layer.weight.requires_grad and wants_leaves():
            if is_hooked(layer.weight):
                refuse(layer.name, "got hooks on its weight between F and B")
            # Detached: the input's grad_fn would keep the whole graph before it alive until the W.
            given = Kept(input_.detach())
            operands = _Operands(given, Kept(grad_output), ctx.gather_group)
            layer.leave(_Deferred(layer, [operands]))
        grad_bias = None
        if ctx.has_bias:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
        if handle is not None:
            handle.wait()
        if ctx.gather_group is not None:
            grad_input = scattered
        return grad_input, grad_bias, None, None, None, None, None, None


def _gather(input_: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """The full sequence of a sequence-parallel input, [s/tp, b, h] -> [s, b, h]; without a group
    the input itself.
    """
    if group is None:
        return input_
    shape = (input_.shape[0] * group.size(), *input_.shape[1:])
    buffers = parallel_state.get_global_memory_buffer()
    full: torch.Tensor = buffers.get_tensor(shape, input_.dtype, "mpu")
    torch.distributed.all_gather_into_tensor(full, input_.contiguous(), group=group)
    return full


def gather_buffers() -> list[torch.Tensor]:
    """The buffers of gathered sequence-parallel inputs. megatron-core replaces one by a larger one
    when needed.
    """
    if not parallel_state.model_parallel_is_initialized():
        return []
    return list(parallel_state.get_global_memory_buffer().buffer.values())
