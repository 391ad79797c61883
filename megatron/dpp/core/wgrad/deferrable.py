"""The protocol of layers whose weight gradients may wait for a W, and the work of one pass.

:class:`Deferrable` has a kind for megatron-core's own parallel layers (``product``) and one for
Transformer Engine's (``te_layer``). ``linear.WeightGradients`` finds them and keeps the order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megatron.dpp.core.wgrad.accumulate import is_hooked
from megatron.dpp.core.wgrad.own_way import STANDS_FOR
from megatron.dpp.errors import ConfigError, setting

if TYPE_CHECKING:
    from megatron.dpp.core.wgrad.linear import WeightGradients

NODE = torch.zeros((), requires_grad=True)
"""An input of products that defer, in the place of their weights. It gets no gradient itself."""
_NODE_ACCUMULATES = torch.autograd.graph.get_gradient_edge(NODE).node


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

    @abc.abstractmethod
    def touches(self, weight: torch.Tensor) -> bool:
        """True if it adds to this weight's gradient."""

    def join(self, other: DeferredWork) -> bool:
        """Take over later work of the same pass, if autograd would add up both gradients before it
        hands them over; False if it would not.
        """
        return False


class Deferrable(abc.ABC):
    """A layer whose weight gradients wait for a W in one step.

    Args:
        piece: its transformer layer, counted from the chunk's first.
        name: for messages.
        module: one without :meth:`why_not`.
        store: takes the work of its backwards, and adds what it computes.
        say: called with the reason why a call does not defer.
    """

    weights: Sequence[torch.nn.Parameter]
    """Parameters whose gradients wait."""
    parameters: Sequence[torch.nn.Parameter]
    """Those, and others of its product."""

    def __init__(
        self, piece: int, name: str, module: Any, store: WeightGradients, say: Callable[[str], None]
    ) -> None:
        self.piece, self.name, self.module, self.store, self._say = piece, name, module, store, say

    @staticmethod
    @abc.abstractmethod
    def takes(module: torch.nn.Module) -> bool:
        """True for a module of this kind."""

    @staticmethod
    @abc.abstractmethod
    def why_not(module: Any, uses: Callable[[torch.Tensor], int]) -> str | None:
        """The reason why a module's own backward must compute its weight gradients: "" if there is
        nothing to tell, None if they may wait.

        Args:
            uses: modules that hold a parameter.
        """

    @abc.abstractmethod
    def bound(self) -> AbstractContextManager[None]:
        """Let the module's forwards defer in the block."""

    def defers(self, value: Any, given: Sequence[torch.Tensor], reason: str | None = None) -> bool:
        """True if a call defers whose backward a gradient of its input leads to.

        Args:
            value: the input.
            given: tensors that the module has in the place of :attr:`parameters`.
            reason: one of the layer's kind why it does not.
        """
        trained = all(weight.requires_grad for weight in given)
        if not trained or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        reason = reason or self._why_call(value, given)
        if reason is not None:
            self._say(reason)
        return reason is None

    def _why_call(self, value: Any, given: Sequence[torch.Tensor]) -> str | None:
        pairs = zip(given, self.parameters, strict=True)
        if not all(own is p or getattr(own, STANDS_FOR, None) is p for own, p in pairs):
            return "a call gets another weight"
        if any(map(is_hooked, self.weights)):
            return "its weight has hooks"
        if type(value) is not torch.Tensor:
            return f"its input is a {type(value).__name__}"
        return "autocast is on" if torch.is_autocast_enabled(value.device.type) else None

    def leave(self, work: DeferredWork) -> None:
        """Leave the work of a backward pass."""
        self.store.defer(self.piece, work)


def wants_leaves() -> bool:
    """In the backward of a product of :data:`NODE`: True if the pass accumulates gradients of
    leaves, and not only asks for those of some tensors, as ``torch.autograd.grad`` does.
    """
    wanted: bool = torch._C._will_engine_execute_node(_NODE_ACCUMULATES)
    return wanted


def refuse(why: str) -> NoReturn:
    """Refuse what deferred weight gradients do not go with.

    Raises:
        ConfigError: always.
    """
    split, off = setting("split_backward"), setting("split_backward", "off")
    raise ConfigError(f"{split}: {why}; use {off}", split, off)


def refuse_unlike(name: str, why: str) -> NoReturn:
    """Refuse to go on with a layer whose gradients would not be those of a fused backward."""
    refuse(
        f"{name} {why}, so that its deferred gradient would differ from that of a fused backward"
    )


class WaitingTensor:
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
            refuse_unlike(
                name, "has an input or an output gradient that was changed in place after its B"
            )
        return self._tensor


@dataclass(eq=False)
class LayerWork(DeferredWork):
    """The weight gradients of one layer; of several products if the pass ran it several times.

    Args:
        products: each with the ``num_bytes`` that it holds.
    """

    layer: Any
    products: list[Any]
    task: int = field(default_factory=torch._C._current_graph_task_id)

    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in self.products)

    def touches(self, weight: torch.Tensor) -> bool:
        return any(own is weight for own in self.layer.weights)

    def join(self, other: DeferredWork) -> bool:
        if isinstance(other, LayerWork) and (other.layer, other.task) == (self.layer, self.task):
            self.products += other.products
            return True
        return False
