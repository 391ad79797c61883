"""Layers that go their own way, as a host has changed what they compute or what their weight is.

A weight gradient is deferred only where nothing between a layer's product and its weight's gradient
is a host's: the layer is of megatron-core's own class, calls megatron-core's own product, and its
weight is a leaf without hooks. :func:`places` finds the modules of a chunk, :func:`why_module` and
:func:`why_weight` tell the reason why a layer's own backward must compute the weight gradient.
Hosts change modules between steps, so all of it is asked in each.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import layers as parallel_layers
from torch.nn.modules import module as torch_module

from megatron.dpp.core.wgrad import accumulate
from megatron.dpp.errors import ConfigError

_PRODUCT = "linear_with_grad_accumulation_and_async_allreduce"
_FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
_FUNCTION_CLASS = getattr(parallel_layers, _FUNCTION)
STANDS_FOR = "dpp_stands_for"
"""Attribute of a parameter over the memory of another one, which a capture computes with."""


class Place(NamedTuple):
    """A module of a chunk.

    ``around`` is the reason why no layer in it may defer, None without one.
    """

    name: str
    module: torch.nn.Module
    around: str | None


def places(module: torch.nn.Module) -> Iterator[Place]:
    """A module and those in it, each at its first place."""
    yield from _places(module, "", _global_hooks(), set())


def _places(
    module: torch.nn.Module, name: str, around: str | None, seen: set[int]
) -> Iterator[Place]:
    if id(module) in seen:
        return
    seen.add(id(module))
    around = around or _watched(module, name)
    yield Place(name, module, around)
    for part, child in module._modules.items():
        if child is not None:
            inner = name if part == "module" else f"{name}.{part}" if name else part
            yield from _places(child, inner, around, seen)


def _global_hooks() -> str | None:
    hooks = (torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks)
    return "all modules have backward hooks" if any(hooks) else None


def _watched(module: torch.nn.Module, name: str) -> str | None:
    """A backward hook may read or change weights' gradients, which a deferred one is not yet among;
    a compiled forward computes in other pieces.
    """
    kind = name or type(module).__name__
    if module._backward_hooks or module._backward_pre_hooks:
        return f"{kind} has backward hooks"
    forward = vars(module).get("forward")
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if compiled or "_orig_mod" in module._modules or hasattr(forward, "_torchdynamo_orig_callable"):
        return f"{kind} is compiled"
    return None


def refuse_shared(chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse a trained parameter in two chunks: the order of their backwards, in which its
    gradients are added, is the schedule's choice.

    Raises:
        ConfigError: names the parameter.
    """
    owner: dict[torch.nn.Parameter, tuple[int, str]] = {}
    for number, chunk in enumerate(chunks if len(chunks) > 1 else ()):
        for name, parameter in chunk.named_parameters():
            first, called = owner.setdefault(parameter, (number, name))
            if first != number and parameter.requires_grad:
                raise ConfigError(
                    f"chunks {first} and {number} of a rank share a parameter ({called} and "
                    f"{name}): a dynamic pipeline would add up its gradients in another order; "
                    "use one chunk per rank or train without the dynamic pipeline"
                )


def why_module(module: torch.nn.Module, kinds: tuple[type, ...]) -> str | None:
    """The reason why a linear layer does not compute as megatron-core wrote it; None if it does.

    Args:
        kinds: classes whose ``forward`` and ``_forward_impl`` are understood.
    """
    kind: Any = type(module)
    if kind not in kinds:
        return f"its class is {kind.__name__}"
    if "_forward_impl" in vars(module):
        return "its _forward_impl was replaced"
    source = sys.modules[kind.__module__]
    for name in ("forward", "_forward_impl"):
        if not is_written_in(getattr(kind, name), source):
            return f"{kind.__name__}.{name} was replaced"
    if not product_is_own():
        return f"{_PRODUCT}, or its autograd function, was replaced"
    return None


def product_is_own() -> bool:
    """True if linear layers now call megatron-core's own product."""
    kind = getattr(parallel_layers, _FUNCTION)
    parts = (getattr(parallel_layers, _PRODUCT), kind.forward, kind.backward)
    return kind is _FUNCTION_CLASS and all(is_written_in(part, parallel_layers) for part in parts)


@functools.lru_cache(maxsize=64)
def is_written_in(function: Any, module: Any) -> bool:
    """True if a function is a module's own, within the wrappers that PyTorch has for it."""
    found = getattr(function, "__globals__", {})
    if str(found.get("__name__")).startswith("torch."):
        found = getattr(inspect.unwrap(function), "__globals__", {})
    return found is vars(module)


def why_weight(
    module: torch.nn.Module, uses: Callable[[torch.Tensor], int], name: str = "weight"
) -> str | None:
    """The reason why the gradient of a layer's weight is its own matter; None if it may be
    deferred.

    Args:
        uses: modules that hold a parameter.
        name: of the weight.
    """
    weight = module._parameters.get(name)
    if weight is None:
        return "its weight is no parameter"
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_leaf:
        return "its weight is computed from others"
    if accumulate.is_hooked(weight):
        return "its weight has hooks"
    if uses(weight) > 1:
        return "its weight is tied"
    return None


def has_hooks(module: torch.nn.Module) -> bool:
    """True if a call of a module, or its backward, runs hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def why_eager(module: torch.nn.Module) -> str | None:
    """The reason why a replay of a captured module would leave out what a host does; None without
    one.
    """
    for place in places(module):
        name = place.name or type(module).__name__
        if place.around is not None:
            return place.around
        if has_hooks(place.module):
            return f"{name} has hooks"
        if "forward" in vars(place.module):
            return f"{name}.forward was replaced"
        for kind, parameter in place.module._parameters.items():
            if parameter is None:
                continue
            if parameter.requires_grad and accumulate.has_hooks(parameter):
                return f"{name}.{kind} has hooks"
    return None


def stands_for(weight: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    """True if a product with ``weight`` is one with ``parameter``."""
    return weight is parameter or getattr(weight, STANDS_FOR, None) is parameter
