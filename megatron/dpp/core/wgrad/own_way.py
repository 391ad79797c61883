"""Layers that go their own way, as a host has changed what they compute or what their weight is.

A weight gradient is deferred only where nothing between a layer's product and its weight's gradient
is a host's: the layer is of megatron-core's own class, calls megatron-core's own product, and its
weight is a leaf without hooks. :func:`modules_of` finds the modules of a chunk; each kind of layer,
and :func:`why_weight`, tell the reason why a layer's own backward must compute the weight gradient.
Hosts change modules between steps, so all of it is asked in each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from megatron.dpp.core.wgrad import accumulate
from megatron.dpp.errors import ConfigError

STANDS_FOR = "dpp_stands_for"
"""Attribute of a parameter over the memory of another one, which a capture computes with."""


def modules_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str | None]]:
    """The modules of a chunk, each once: its name without those of wrappers, the module, and the
    reason why no layer in it may defer, None without one.
    """
    hooks = (torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks)
    reasons = {"": "all modules have backward hooks" if any(hooks) else None}
    for place, module in chunk.named_modules():
        name = ".".join(part for part in place.split(".") if part != "module")
        around = reasons[place.rpartition(".")[0]]
        reasons[place] = around or watched(module, name or type(module).__name__)
        yield name, module, reasons[place]


def watched(module: torch.nn.Module, name: str) -> str | None:
    """The reason why a host watches a module or computes it in other pieces; None if it does not.
    A backward hook may read or change weights' gradients, which a deferred one is not yet among.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        return f"{name} has backward hooks"
    forward = vars(module).get("forward")
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if compiled or "_orig_mod" in module._modules or hasattr(forward, "_torchdynamo_orig_callable"):
        return f"{name} is compiled"
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


@functools.lru_cache(maxsize=64)
def is_written_in(function: Any, module: Any) -> bool:
    """True if a function is a module's own, within wrappers of PyTorch, Transformer Engine or
    megatron-core.
    """
    names = getattr(function, "__globals__", {})
    if str(names.get("__name__")).startswith(("torch.", "transformer_engine.", "megatron.core.")):
        names = getattr(inspect.unwrap(function), "__globals__", {})
    return names is vars(module)


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


def why_eager(module: torch.nn.Module) -> str | None:
    """The reason why a replay of a captured module would leave out what a host does; None without
    one.
    """
    for place, part, around in modules_of(module):
        name = place or type(part).__name__
        if around is not None:
            return around
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name} has hooks"
        if "forward" in vars(part):
            return f"{name}.forward was replaced"
        for kind, parameter in part._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if accumulate.node_is_hooked(parameter):
                return f"{name}.{kind} has hooks"
    return None
