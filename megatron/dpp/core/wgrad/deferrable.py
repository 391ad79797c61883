"""The protocol of layers whose weight gradients may wait for a W, and the work of one pass.

:class:`Deferrable` has a kind for megatron-core's own parallel layers (``product``) and one for
Transformer Engine's (``te_layer``). ``linear.WeightGradients`` finds them and keeps the order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch

from megatron.dpp.errors import ConfigError, setting

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

    def touches(self, weight: torch.Tensor) -> bool:
        """True if it adds to this weight's gradient."""
        return False

    def join(self, other: DeferredWork) -> bool:
        """Take over later work of the same pass, if autograd would add up both gradients before it
        hands them over; False if it would not.
        """
        return False


class Store(Protocol):
    """Takes the work of backward passes, and adds what it computes."""

    def defer(self, layer: int, work: DeferredWork) -> None:
        """Take work of a layer, counted from the chunk's first."""
        ...

    def add(self, parameter: torch.nn.Parameter, given: list[torch.Tensor]) -> None:
        """Add a gradient to a parameter, as :func:`accumulate.add`."""
        ...


class Deferrable(abc.ABC):
    """A layer whose weight gradients wait for a W in one step.

    Args:
        piece: its transformer layer, counted from the chunk's first.
        name: for messages.
        module: one without :meth:`why_not`.
        store: takes the work of its backwards.
        say: called with the reason why a call does not defer.
    """

    def __init__(
        self, piece: int, name: str, module: Any, store: Store, say: Callable[[str], None]
    ) -> None:
        self.piece, self.name, self.module, self.store, self._say = piece, name, module, store, say
        self.weights: list[Any] = []
        """Parameters whose gradients wait."""

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

    def defers(self, why_not: str | None) -> bool:
        """True if a call without this reason defers; tells the reason otherwise."""
        if why_not:
            self._say(why_not)
        return why_not is None

    def leave(self, work: DeferredWork) -> None:
        """Leave the work of a backward pass."""
        self.store.defer(self.piece, work)


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


def _task() -> int:
    number: int = torch._C._current_graph_task_id()
    return number


class HasBytes(Protocol):
    """One product's operands, by the memory that they hold."""

    @property
    def num_bytes(self) -> int: ...


LayerT = TypeVar("LayerT", bound=Deferrable)
ProductT = TypeVar("ProductT", bound=HasBytes)


@dataclass(eq=False)
class LayerWork(DeferredWork, Generic[LayerT, ProductT]):
    """The weight gradients of one layer; of several products if the pass ran it several times."""

    layer: LayerT
    products: list[ProductT]
    task: int = field(default_factory=_task)

    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.products)

    def touches(self, weight: torch.Tensor) -> bool:
        return any(own is weight for own in self.layer.weights)

    def join(self, other: DeferredWork) -> bool:
        if isinstance(other, LayerWork) and (other.layer, other.task) == (self.layer, self.task):
            self.products += other.products
            return True
        return False
