"""megatron-core's own parallel linear layers, whose weight gradients wait for a W."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.dpp.core import compat
from megatron.dpp.core.wgrad.accumulate import is_hooked
from megatron.dpp.core.wgrad.deferrable import (
    NODE,
    Deferrable,
    LayerWork,
    WaitingTensor,
    refuse_unlike,
    wants_leaves,
)
from megatron.dpp.core.wgrad.own_way import is_written_in, why_weight

CLASSES: tuple[type, ...] = (
    parallel_layers.ColumnParallelLinear,
    parallel_layers.RowParallelLinear,
)
_PRODUCT = "linear_with_grad_accumulation_and_async_allreduce"
_FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
_FUNCTION_CLASS = getattr(parallel_layers, _FUNCTION)
_KERNELS = "tensor_parallel.layers:fused_weight_gradient_mlp_cuda"


def product_is_own() -> bool:
    """True if linear layers now call megatron-core's own product."""
    kind = getattr(parallel_layers, _FUNCTION)
    parts = (getattr(parallel_layers, _PRODUCT), kind.forward, kind.backward)
    return kind is _FUNCTION_CLASS and all(is_written_in(part, parallel_layers) for part in parts)


class _Operands(NamedTuple):
    """Of one weight gradient: [s(/tp), b, in] and [s, b, out]."""

    input: WaitingTensor
    grad_output: WaitingTensor
    gather_group: torch.distributed.ProcessGroup | None

    @property
    def num_bytes(self) -> int:
        return self.input.num_bytes + self.grad_output.num_bytes


class Layer(Deferrable):
    """A linear layer of megatron-core's."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.weight: torch.nn.Parameter = self.module.weight
        self.weights = self.parameters = [self.weight]
        self.fused = bool(self.module.gradient_accumulation_fusion)

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        return isinstance(module, CLASSES)

    @staticmethod
    def why_not(module: Any, uses: Callable[[torch.Tensor], int]) -> str | None:
        weight, kind = module._parameters.get("weight"), type(module)
        given = weight is None and vars(module).get("weight", module) is None  # one in each call
        if given or (weight is not None and not weight.requires_grad):
            return ""
        if kind not in CLASSES:
            return f"its class is {kind.__name__}"
        if "_forward_impl" in vars(module):
            return "its _forward_impl was replaced"
        for name in ("forward", "_forward_impl"):
            if not is_written_in(getattr(kind, name), sys.modules[kind.__module__]):
                return f"{kind.__name__}.{name} was replaced"
        if not product_is_own():
            return f"{_PRODUCT}, or its autograd function, was replaced"
        return why_weight(module, uses)

    @contextmanager
    def bound(self) -> Iterator[None]:
        self.module._forward_impl = self._forward
        try:
            yield
        finally:
            vars(self.module).pop("_forward_impl", None)

    def _forward(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        bias, group = options["bias"], options["tp_group"]
        # Where all layers before it are frozen, none waits for its B.
        leads = input.requires_grad or (bias is not None and bias.requires_grad)
        usual = leads and not options.get("output_dtype")
        reason = None if product_is_own() else "megatron-core's product is replaced in a call"
        if not (usual and self.defers(input, [weight], reason)):
            own = type(self.module)._forward_impl
            return own(self.module, input, weight, **options)  # type: ignore[no-any-return]
        gathered_over = group if options["sequence_parallel"] else None
        return InputGradientNow.apply(  # type: ignore[no-any-return, no-untyped-call]
            input, bias, NODE, (weight,), self, options["allreduce_dgrad"], gathered_over, group
        )


class _Deferred(LayerWork):
    @torch.no_grad()
    def compute(self) -> None:
        layer = self.layer
        gradients: list[torch.Tensor] = []
        for operands in self.products:
            total_input = _gather(operands.input.get(layer.name), operands.gather_group)
            grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
                operands.grad_output.get(layer.name), total_input
            )
            if layer.fused:
                add_product(layer.weight, total_input, grad_output)
            else:
                added = grad_output.t().matmul(total_input)
                gradients = [gradients.pop() + added if gradients else added]
                del added
        layer.store.add(layer.weight, gradients)


class InputGradientNow(torch.autograd.Function):
    """``input @ weight.T + bias`` whose backward defers the weight gradient to the layer's store.

    The weight is no input of the autograd graph: otherwise autograd would run its gradient
    accumulator, and DDP's hook, before its gradient exists. ``NODE`` stands in its place, and tells
    if a pass accumulates gradients of leaves at all.
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
                refuse_unlike(layer.name, "got hooks on its weight between F and B")
            # Detached: the input's grad_fn would keep the whole graph before it alive until the W.
            given = WaitingTensor(input_.detach())
            operands = _Operands(given, WaitingTensor(grad_output), ctx.gather_group)
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


def add_product(weight: Any, total_input: torch.Tensor, grad_output: torch.Tensor) -> None:
    """Add one microbatch's weight gradient to ``weight.main_grad``.

    Args:
        weight: [out, in], with a ``main_grad`` of its shape in fp32 or in its own dtype.
        total_input: [tokens, in].
        grad_output: [tokens, out].
    """
    kernels, main_grad = compat.lookup(_KERNELS), weight.main_grad
    half = main_grad.dtype in (torch.float16, torch.bfloat16)
    kernel = kernels.wgrad_gemm_accum_fp16 if half else kernels.wgrad_gemm_accum_fp32
    kernel(total_input, grad_output, main_grad)
