"""The product of a linear layer whose weight gradient waits for its W."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.dpp.core.wgrad import fused as fused_wgrad
from megatron.dpp.core.wgrad.accumulate import is_hooked
from megatron.dpp.core.wgrad.own_way import product_is_own, stands_for
from megatron.dpp.errors import ConfigError, setting

NODE = torch.zeros((), requires_grad=True)
"""An input of products that defer, in the place of their weights. It gets no gradient itself."""
_NODE_ACCUMULATES = torch.autograd.graph.get_gradient_edge(NODE).node

Defer = Callable[[int, "DeferredWork"], None]
"""Takes the work of a layer, counted from the chunk's first."""
Add = Callable[[Any, list[torch.Tensor]], None]


class DeferredWork(abc.ABC):
    """Work that a backward pass leaves for its W."""

    task = -1
    """Autograd's number of the pass, where the order of its additions matters."""

    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Memory that it holds, beyond the activation."""

    @abc.abstractmethod
    def compute(self) -> None:
        """Compute the gradients and hand them over."""

    def touches(self, weight: torch.Tensor) -> bool:
        """True if it adds to this weight's gradient."""
        return False

    def join(self, other: DeferredWork) -> bool:
        """Take over later work of the same pass, if autograd would add up both gradients before it
        hands them over; False if it would not.
        """
        return False


def wants_leaves() -> bool:
    """In the backward of a product of :data:`NODE`: True if the pass accumulates gradients of
    leaves, and not only asks for those of some tensors, as ``torch.autograd.grad`` does.
    """
    wanted: bool = torch._C._will_engine_execute_node(_NODE_ACCUMULATES)
    return wanted


def refuse(name: str, why: str) -> NoReturn:
    """Refuse to go on with a layer whose gradients would not be those of a fused backward.

    Raises:
        ConfigError: always.
    """
    split, off = setting("split_backward"), setting("split_backward", "off")
    raise ConfigError(
        f"{split}: {name} {why}, so that its deferred gradient would differ from that of "
        f"a fused backward; use {off}",
        split,
        off,
    )


class Kept:
    """A tensor that waits for a W, as it is now. Autograd would add to an output gradient in place
    if nobody else held it, hence no copy of its handle.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version
        self.num_bytes = tensor.numel() * tensor.element_size()

    def get(self, name: str) -> torch.Tensor:
        """The tensor.

        Raises:
            ConfigError: it was changed since.
        """
        if self._tensor._version != self._version:
            refuse(name, "has an input or an output gradient that was changed in place after its B")
        return self._tensor


class _Operands(NamedTuple):
    """Of one weight gradient: [s(/tp), b, in] and [s, b, out]."""

    input: Kept
    grad_output: Kept
    gather_group: torch.distributed.ProcessGroup | None

    @property
    def num_bytes(self) -> int:
        return self.input.num_bytes + self.grad_output.num_bytes


class Layer:
    """A linear layer whose products defer.

    Args:
        piece: its transformer layer.
        name: for messages.
        module: of megatron-core's own class.
        add: adds a gradient to a parameter, see :func:`accumulate.add`.
        defer: takes the work of a backward pass.
    """

    def __init__(
        self,
        piece: int,
        name: str,
        module: Any,
        add: Add,
        defer: Defer,
    ) -> None:
        self.piece, self.name, self.defer, self.add = piece, name, defer, add
        self.weight: torch.nn.Parameter = module.weight
        self.fused = bool(module.gradient_accumulation_fusion)

    def why_not(
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


def _task() -> int:
    number: int = torch._C._current_graph_task_id()
    return number


class HasBytes(Protocol):
    """One product's operands, by the memory that they hold."""

    @property
    def num_bytes(self) -> int: ...


LayerT = TypeVar("LayerT")
ProductT = TypeVar("ProductT", bound=HasBytes)


@dataclass(eq=False)
class LayerWork(DeferredWork, Generic[LayerT, ProductT]):
    """The weight gradients of one layer; of several products if the pass ran it several times."""

    layer: LayerT
    products: list[ProductT]
    task: int = field(default_factory=_task)

    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.products)

    def join(self, other: DeferredWork) -> bool:
        if isinstance(other, LayerWork) and (other.layer, other.task) == (self.layer, self.task):
            self.products += other.products
            return True
        return False


class _Deferred(LayerWork[Layer, _Operands]):
    def touches(self, weight: torch.Tensor) -> bool:
        return self.layer.weight is weight

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
        layer.add(layer.weight, gradients)


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
            layer.defer(layer.piece, _Deferred(layer, [operands]))
        grad_bias = None
        if ctx.has_bias:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
        if handle is not None:
            handle.wait()
        if ctx.gather_group is not None:
            grad_input = scattered
        return grad_input, grad_bias, None, None, None, None, None, None


def forward_of(
    module: Any, layer: Layer, say: Callable[[str], None]
) -> Callable[..., torch.Tensor]:
    """The ``_forward_impl`` of a linear layer while its weight gradients are deferred.

    Args:
        say: called with the reason why a call does not defer.
    """

    def forward_impl(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        why_not = layer.why_not(input, weight, options)
        if why_not is not None:
            if why_not:
                say(why_not)
            own: torch.Tensor = type(module)._forward_impl(module, input, weight, **options)
            return own
        sequence_parallel = options["sequence_parallel"]
        output: torch.Tensor = InputGradientNow.apply(  # type: ignore[no-untyped-call]
            input,
            options["bias"],
            NODE,
            (weight,),
            layer,
            options["allreduce_dgrad"],
            options["tp_group"] if sequence_parallel else None,
            options["tp_group"],
        )
        return output

    return forward_impl


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
