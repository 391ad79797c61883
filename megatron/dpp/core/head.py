"""The LM head, whose backward may run in F.

A head's logits take the most memory of a stage, and are needed from its forward to its backward.
:class:`Head` cuts the graph of the last chunk at the input of ``output_layer``. F then runs output
layer, loss and their backward at once, and keeps the gradient of the hidden states, from which B
starts. So the logits of one microbatch exist at a time, whatever the order of F and B. The weight
of the head gets its gradients in the order of F, which is that of B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.dpp.core import boundary
from megatron.dpp.core.boundary import Tensors
from megatron.dpp.core.model import attribute_of


class HeadCut(NamedTuple):
    """The part of F that B goes on from.

    Args:
        hidden: the input of the output layer, whose storage may be freed.
        gradient: of the hidden states, like them.
    """

    hidden: torch.Tensor
    gradient: torch.Tensor

    @property
    def root(self) -> tuple[Tensors, Tensors]:
        """The output from which B runs, and its gradient."""
        if self.hidden.numel() == self.gradient.numel() > 1:  # its storage could not be freed
            return [self.hidden], [self.gradient]
        return self.hidden, self.gradient


class Head:
    """The output layer and the loss of a pipeline's last chunk.

    Args:
        chunk: the chunk, wrapped or bare.
        refuse: called with the reason why a head stays whole. If it returns, B runs the backward of
            the head, too.
    """

    def __init__(self, chunk: torch.nn.Module, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._layer: torch.nn.Module | None = attribute_of(chunk, "output_layer")
        if self._layer is None:
            refuse(f"{type(chunk).__name__} has no output_layer")
            return
        own = {id(parameter) for parameter in self._layer.parameters()}
        self._others = {id(one) for one in chunk.parameters() if id(one) not in own}
        self._config = get_model_config(chunk)
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Find the place of the cut while a forward runs in the block."""
        self._inputs.clear()
        if self._layer is None:
            yield
            return
        hook = self._layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the output layer a view of its input, whose node in the graph is the cut."""
        first = kwargs.get("input_") if not args else args[0]
        if not isinstance(first, torch.Tensor) or not torch.is_grad_enabled():
            return None
        view = first.view_as(first)
        self._inputs.append((first, view))
        return ((view, *args[1:]), kwargs) if args else (args, {**kwargs, "input_": view})

    def backward(self, loss: torch.Tensor, received: Tensors | None) -> HeadCut | None:
        """Run the backward of the loss down to the cut, and free what it kept.

        Args:
            loss: of the forward in :meth:`cut`, before the gradient's scale.
            received: the chunk's input.

        Returns:
            The part that B goes on from; None if the head stays whole, as the loss reads more of
            the model than its output layer, once.
        """
        if self._layer is None:
            return None
        inputs, self._inputs = self._inputs, []
        if len(inputs) != 1:
            self._refuse(f"a forward runs the output layer {len(inputs)} times")
            return None
        ((hidden, view),) = inputs
        leaves = _leaves_above(loss, view)
        others = self._others | {id(tensor) for tensor in boundary.as_list(received)}
        if any(id(leaf) in others for leaf in leaves):
            self._refuse("the loss reads more of the model than its output layer")
            return None
        if self._config.grad_scale_func is not None:
            loss = self._config.grad_scale_func(loss)
        ends = [tensor for tensor in (view, *leaves) if tensor.requires_grad]
        if ends and loss.requires_grad:
            torch.autograd.backward(loss, inputs=ends)
        gradient = view.grad if view.requires_grad and loss.requires_grad else None
        if gradient is None:  # the layers are frozen, or the loss does not depend on the logits
            gradient = torch.zeros_like(hidden)
        if hidden._base is None and hidden.grad_fn is not None:
            schedules.deallocate_output_tensor(hidden, self._config.deallocate_pipeline_outputs)
        return HeadCut(hidden, gradient)


def why_not_in_forward(chunks: list[torch.nn.Module], num_ranks: int) -> str | None:
    """The reason why a pipeline's head cannot run its backward in F, the same on all ranks; None
    if it can.
    """
    config = get_model_config(chunks[0])
    if (further := getattr(config, "mtp_num_layers", None)) is not None:
        return f"mtp_num_layers={further!r} runs the output layer several times"
    if num_ranks * len(chunks) == 1 and attribute_of(
        chunks[0], "share_embeddings_and_output_weights"
    ):
        return (
            "the output layer's weight is the embedding of the same chunk, whose gradients would "
            "be added in another order"
        )
    if attribute_of(chunks[0], "add_binary_head"):
        return "a binary head reads the hidden states beside the output layer"
    return None


def _leaves_above(loss: torch.Tensor, cut: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of a loss's graph that are reached without passing the cut."""
    found: list[torch.Tensor] = []
    waiting, reached = [loss.grad_fn], {loss.grad_fn, cut.grad_fn}
    while waiting:
        function = waiting.pop()
        if function is None:
            continue
        if hasattr(function, "variable"):
            found.append(function.variable)
        for before, _ in function.next_functions:
            if before is not None and before not in reached:
                reached.add(before)
                waiting.append(before)
    return found
