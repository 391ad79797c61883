"""Weight gradients apart from input gradients, for megatron-core's parallel linear layers.

The previous stage waits for the gradient of a linear layer's input; the gradient of its weight is
needed only by the optimizer step. ``WeightGradients`` rebinds the linear layers of a chunk for a
step, so that a backward pass computes the former and *defers* the latter; ``run`` computes it
later, one layer at a time. Each weight gets its contributions in microbatch order through
DistributedDataParallel's own hook, so the numbers are bitwise those of a fused backward.

Transformer Engine's modules delay their weight gradients themselves (``te``). Embeddings, the LM
head, biases and norms are not deferred: they would hold much memory for little gain.

Source of the idea: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_model_config,
    prepare_input_tensors_for_wgrad_compute,
)

from megatron.dpp.core.experts import GroupedExperts, GroupedLinear, weight_gradients
from megatron.dpp.core.grad_sync import replicated
from megatron.dpp.core.wgrad import fused as fused_wgrad
from megatron.dpp.core.wgrad.te import DelayedModules
from megatron.dpp.errors import ConfigError


@dataclass(frozen=True)
class _Layer:
    """One rebound linear layer."""

    piece: int
    weight: torch.nn.Parameter
    accumulate: Callable[[torch.Tensor], None]
    fused: bool
    store: WeightGradients


@dataclass(frozen=True)
class _Deferred:
    """The operands of one layer's weight gradient: [s(/tp), b, in] and [s, b, out]."""

    layer: _Layer
    input: torch.Tensor
    grad_output: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.input, self.grad_output))

    @torch.no_grad()
    def compute(self) -> None:
        total_input = _gather(self.input, self.gather_group)
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output, total_input
        )
        layer = self.layer
        if layer.fused:
            fused_wgrad.accumulate(layer.weight, total_input, grad_output)
            layer.accumulate(torch.empty_like(layer.weight))
        else:
            layer.accumulate(grad_output.t().matmul(total_input))


@dataclass(frozen=True)
class _DeferredGroup:
    """The operands of the weight gradients of one linear layer of all experts."""

    accumulate: list[Callable[[torch.Tensor], None]]
    input: torch.Tensor
    grad_output: torch.Tensor
    ends: torch.Tensor

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.input, self.grad_output))

    def compute(self) -> None:
        gradients = weight_gradients(self.input, self.grad_output, self.ends)
        for accumulate, gradient in zip(self.accumulate, gradients, strict=True):
            accumulate(gradient)


class DeferredWork(Protocol):
    """Work that a backward pass leaves for its W."""

    def num_bytes(self) -> int:
        """Memory that it holds, beyond the activation."""
        ...

    def compute(self) -> None:
        """Compute the gradients and hand them over."""
        ...


class _InputGradientNow(torch.autograd.Function):
    """``input @ weight.T + bias`` whose backward defers the weight gradient to the store.

    The weight is no input of the autograd graph: otherwise autograd would run its gradient
    accumulator, and DDP's hook, before its gradient exists.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        bias: torch.Tensor | None,
        layer: _Layer,
        allreduce_dgrad: bool,
        gather_group: torch.distributed.ProcessGroup | None,
        tp_group: torch.distributed.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.layer, ctx.allreduce_dgrad = layer, allreduce_dgrad
        ctx.gather_group, ctx.tp_group, ctx.has_bias = gather_group, tp_group, bias is not None
        output = torch.matmul(_gather(input_, gather_group), layer.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        (input_,) = ctx.saved_tensors
        grad_input = grad_output.matmul(ctx.layer.weight)
        handle = None
        if ctx.allreduce_dgrad:
            handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        if ctx.gather_group is not None:
            scattered = torch.empty_like(input_)
            handle = torch.distributed.reduce_scatter_tensor(
                scattered, grad_input, group=ctx.gather_group, async_op=True
            )
        # Detached: the input's grad_fn would keep the whole graph before it alive until the W.
        work = _Deferred(ctx.layer, input_.detach(), grad_output, ctx.gather_group)
        ctx.layer.store.defer(ctx.layer.piece, work)
        grad_bias = None
        if ctx.has_bias:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
        if handle is not None:
            handle.wait()
        if ctx.gather_group is not None:
            grad_input = scattered
        return grad_input, grad_bias, None, None, None, None


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


class WeightGradients:
    """The deferred weight gradients of one rank's model chunks.

    Args:
        chunks: the rank's model chunks, DDP-wrapped or bare, in chunk order.

    Raises:
        ConfigError: a chunk's layers accumulate gradients in a way that cannot be deferred.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._current: dict[int, list[DeferredWork]] | None = None
        self._waiting: dict[tuple[int, int], dict[int, list[DeferredWork]]] = {}
        self._layers: list[tuple[Any, Callable[..., torch.Tensor]]] = []
        self._groups: list[tuple[GroupedLinear, Callable[..., None]]] = []
        self._held_bytes = 0
        self._delayed: list[DelayedModules] = []
        self.num_pieces = tuple(self._prepare(chunk) for chunk in chunks)

    @property
    def held_bytes(self) -> int:
        """Memory that deferred work holds, beyond activations."""
        return self._held_bytes + sum(modules.num_bytes() for modules in self._delayed)

    def delayed_by_modules(self, chunk: int) -> DelayedModules | None:
        """The modules of a chunk that delay their weight gradients; None if it has none."""
        return self._delayed[chunk] or None

    def _prepare(self, chunk: torch.nn.Module) -> int:
        """Find a chunk's linear layers; returns its number of pieces (transformer layers), 0 if
        nothing can be deferred.
        """
        if getattr(get_model_config(chunk), "enable_autocast", False):
            raise ConfigError(
                "--dpp-split-backward computes weight gradients outside of autocast (the model's "
                "enable_autocast): use --no-dpp-split-backward, or parameters of the dtype that is "
                "computed with"
            )
        block = decoder_block(chunk)
        layers = list(block.layers) if block is not None else []
        self._delayed.append(DelayedModules(chunk, layers, _ddp_of(chunk)))
        num_known = len(self._layers)
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    self._add(module, number, chunk)
                elif isinstance(module, GroupedExperts):
                    self._add_group(module, number, chunk)
        deferred = self._delayed[-1] or len(self._layers) > num_known
        return len(layers) if deferred else 0

    def _add(self, module: Any, piece: int, chunk: torch.nn.Module) -> None:
        if module.weight is None or not module.weight.requires_grad:
            return
        layer = _Layer(
            piece=piece,
            weight=module.weight,
            accumulate=gradient_accumulator(module.weight, chunk),
            fused=bool(module.gradient_accumulation_fusion),
            store=self,
        )

        def forward_impl(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
            frozen_before = not (input.requires_grad or _wants(options["bias"]))
            if torch.is_grad_enabled() and (frozen_before or options.get("output_dtype")):
                # The weight gradient is computed within B: all layers before it are frozen, so
                # autograd would not run the backward below; or its product has another dtype.
                own: torch.Tensor = type(module)._forward_impl(module, input, weight, **options)
                return own
            sequence_parallel = options["sequence_parallel"]
            output: torch.Tensor = _InputGradientNow.apply(  # type: ignore[no-untyped-call]
                input,
                options["bias"],
                layer,
                options["allreduce_dgrad"],
                options["tp_group"] if sequence_parallel else None,
                options["tp_group"],
            )
            return output

        self._layers.append((module, forward_impl))

    def _add_group(self, experts: GroupedExperts, piece: int, chunk: torch.nn.Module) -> None:
        for linear in experts.linears:
            if not all(weight.requires_grad for weight in linear.weights):
                continue
            accumulate = [gradient_accumulator(weight, chunk) for weight in linear.weights]

            def defer(*operands: torch.Tensor, accumulate: list[Any] = accumulate) -> None:
                self.defer(piece, _DeferredGroup(accumulate, *operands))

            self._groups.append((linear, defer))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Make the layers' backwards defer for one step; the model is restored after it."""
        for modules in self._delayed:
            modules.restart()
        for module, forward_impl in self._layers:
            module._forward_impl = forward_impl
        for linear, defer in self._groups:
            linear.defer = defer
        try:
            yield
        finally:
            for module, _ in self._layers:
                del module._forward_impl
            for linear, _ in self._groups:
                linear.defer = None
        for modules in self._delayed:
            modules.check_empty()

    @contextmanager
    def collect(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Assign the work that one backward pass defers to (chunk, microbatch)."""
        with self.divert() as self._waiting[chunk, microbatch]:
            yield
        self._delayed[chunk].after_backward(microbatch)

    @contextmanager
    def divert(self) -> Iterator[dict[int, list[DeferredWork]]]:
        """Give the work that a backward pass defers to the caller, by layer of the chunk."""
        before, self._current = self._current, defaultdict(list)
        try:
            yield self._current
        finally:
            self._current = before

    def defer(self, layer: int, work: DeferredWork) -> None:
        """Defer work of a layer (counted from the chunk's first); outside of :meth:`collect` it
        runs at once.
        """
        if self._current is None:
            work.compute()
            return
        self._current[layer].append(work)
        self._held_bytes += work.num_bytes()

    def run(self, chunk: int, microbatch: int, piece: int) -> None:
        """Compute the weight gradients of one transformer layer; ``piece`` counts from the last."""
        waiting, layer = self._waiting[chunk, microbatch], self.num_pieces[chunk] - 1 - piece
        if self._delayed[chunk]:
            self._delayed[chunk].run(layer, microbatch)
        for item in waiting.pop(layer, ()):
            item.compute()
            self._held_bytes -= item.num_bytes()
        if piece == self.num_pieces[chunk] - 1:
            if waiting:
                raise AssertionError(f"weight gradients left over: {sorted(waiting)}")
            del self._waiting[chunk, microbatch]


def _wants(bias: torch.Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def gradient_accumulator(
    weight: torch.nn.Parameter, chunk: torch.nn.Module
) -> Callable[[torch.Tensor], None]:
    """A function that adds a gradient to ``weight``, through DDP's hook if DDP wraps the chunk."""
    ddp = _ddp_of(chunk, weight)
    hook = None if ddp is None else ddp._make_backward_post_hook(weight)

    def accumulate(gradient: torch.Tensor) -> None:
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if hook is not None:
            hook()

    return accumulate


def _ddp_of(chunk: torch.nn.Module, weight: torch.nn.Parameter | None = None) -> Any | None:
    """The DDP of a chunk, or the one that holds ``weight`` where its parts have one each."""
    if isinstance(chunk, DistributedDataParallel):
        return chunk
    for ddp in replicated(chunk):
        if weight is None or weight in ddp.param_to_bucket_group:
            return ddp
    if hasattr(chunk, "start_grad_sync"):
        raise ConfigError(
            f"--dpp-split-backward cannot defer weight gradients under {type(chunk).__name__}; "
            "use --no-dpp-split-backward or megatron-core's DistributedDataParallel"
        )
    return None


def decoder_block(chunk: torch.nn.Module) -> Any | None:
    """A chunk's transformer block (``decoder`` of a GPT, ``encoder`` of a BERT), or None."""
    for name in ("decoder", "encoder"):
        try:
            block = get_attr_wrapped_model(chunk, name, allow_none=False)
        except RuntimeError:
            continue
        if block is not None:
            return block
    return None
