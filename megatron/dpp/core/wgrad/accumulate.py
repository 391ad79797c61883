"""Gradients that are added to a parameter outside of a backward pass, as autograd adds them.

A host may keep references to a parameter's ``grad``, make it a view of one buffer, or hook the node
that accumulates it, as DistributedDataParallel does. All of it works, since autograd itself adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as DDP

_OWN = "megatron.core."
_Hook = Callable[..., Any]


class _Give(torch.autograd.Function):
    """The root of a pass that gives one gradient to a parameter, which autograd may keep as it is,
    since nobody else holds it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        ctx.given = given
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.given.pop(), None


def add(parameter: Any, given: list[torch.Tensor]) -> None:
    """Add a gradient to a parameter, with all hooks.

    Args:
        given: the gradient, in any dtype, which is taken out of the list. An empty list stands for
            one that a product has added to ``main_grad``.
    """
    if not given:
        parameter.grad_added_to_main_grad = True
    before, after = _hooks_of(parameter) if parameter.grad is None else ([], [])
    if parameter.grad is None and not _is_changed(parameter, before, after):
        # What autograd would do, which waits for other streams and cannot be captured.
        parameter.grad = given.pop().to(parameter.dtype) if given else _stand_in(parameter)
        for hook in after:
            hook((), ())
        return
    if not given:
        given = [_stand_in(parameter).contiguous()]
    with torch.enable_grad():
        root = _Give.apply(parameter, given)  # type: ignore[no-untyped-call]
    torch.autograd.backward(root, root.detach())


@dataclass(frozen=True)
class Adjacent:
    """The sums of gradients that DistributedDataParallel keeps of parameters of one shape, one
    behind the other in memory: one kernel adds to all of them. DDP's own hooks would do nothing
    else, while ``GradSync`` keeps them from reducing.

    Args:
        places: of each parameter in memory.
        total: their sums in the order of memory, [number, *shape].
        dtype: of the parameters.
    """

    places: list[int]
    total: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Sequence[Any]) -> Adjacent | None:
        """None where a parameter has other hooks, or its sum elsewhere."""
        if not all(map(_ddp_alone_adds, parameters)):
            return None
        sums = sorted((p.main_grad for p in parameters), key=torch.Tensor.data_ptr)
        first, size = sums[0], sums[0].nbytes
        kinds = {(s.untyped_storage().data_ptr(), s.shape, s.stride(), s.dtype) for s in sums}
        if len(kinds) > 1 or not first.is_contiguous():
            return None
        if any(s.data_ptr() != first.data_ptr() + n * size for n, s in enumerate(sums)):
            return None
        shape, strides = (len(sums), *first.shape), (first.numel(), *first.stride())
        places = [(p.main_grad.data_ptr() - first.data_ptr()) // size for p in parameters]
        return cls(places, first.as_strided(shape, strides), parameters[0].dtype)

    def add(self, gradients: torch.Tensor) -> None:
        """Add gradients, [number, *shape], each at its parameter's place."""
        self.total.add_(gradients.to(self.dtype))


def _ddp_alone_adds(parameter: Any) -> bool:
    before, after = _hooks_of(parameter)
    alone = [getattr(hook, "__module__", "") for hook in after] == [DDP.__module__]
    own = alone and not _is_changed(parameter, before, after)
    return own and parameter.grad is None and not parameter.grad_added_to_main_grad


class OwnHook(functools.partial[None]):
    """A hook of the project's on a parameter."""


def is_hooked(parameter: torch.Tensor) -> bool:
    """True if a host has hooked a parameter itself."""
    hooks = (parameter._backward_hooks or {}).values()
    ours = all(isinstance(hook, OwnHook) for hook in hooks)
    return bool(parameter._post_accumulate_grad_hooks) or not ours


def node_is_hooked(parameter: torch.Tensor) -> bool:
    """True if a host has hooked a parameter, or the node that accumulates its gradient. Hooks of
    DistributedDataParallel do not count, which read no argument.
    """
    return _is_changed(parameter, *_hooks_of(parameter))


def _is_changed(parameter: torch.Tensor, before: list[_Hook], after: list[_Hook]) -> bool:
    own = all(getattr(hook, "__module__", "").startswith(_OWN) for hook in after)
    return is_hooked(parameter) or bool(before) or not own


def _hooks_of(parameter: torch.Tensor) -> tuple[list[_Hook], list[_Hook]]:
    """The hooks that run before and after autograd's node adds a gradient."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    handles: list[Any] = [node.register_prehook(print), node.register_hook(print)]
    before, after = ([*handle.hooks_dict_ref().values()][:-1] for handle in handles)  # without ours
    for handle in handles:
        handle.remove()
    return before, after


def _stand_in(parameter: Any) -> torch.Tensor:
    """A gradient without memory, of which only zeros are read."""
    zeros = getattr(parameter, "zero_out_wgrad", False)
    one: torch.Tensor = parameter.new_zeros(()) if zeros else parameter.new_empty(())
    return one.expand(parameter.shape)
