"""Parts of a model chunk within a host's wrappers, and forwards that stand in for theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model

OF_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask")
"""Arguments of a GPT's forward of shape [b, s]."""
NOT_OF_TOKENS = ("decoder_input", "inference_context", "padding_mask")
"""Further arguments, with which a forward takes neither a part of its tokens nor more of them."""


def attribute_of(chunk: torch.nn.Module, *names: str) -> Any:
    """The first of these attributes that the model or a wrapper has; None without one."""
    for name in names:
        with contextlib.suppress(RuntimeError):
            return get_attr_wrapped_model(chunk, name, allow_none=False)
    return None


def unusual(config: Any, usual: Mapping[str, object]) -> list[str]:
    """The settings of a model's config that have other values than these, with theirs."""
    found = {name: getattr(config, name, value) for name, value in usual.items()}
    return [f"{name}={value!r}" for name, value in found.items() if value != usual[name]]


def balancing_of(config: Any) -> set[str]:
    """The ways in which a model's routers balance their load."""
    kinds = getattr(config, "moe_router_load_balancing_type", None) or ()
    return {kinds} if isinstance(kinds, str) else set(kinds)


def routes_by_device(config: Any) -> bool:
    """True if a router's way of balancing asks the device for a number."""
    return bool(balancing_of(config) & {"sinkhorn", "global_aux_loss"})


def replays_routing(config: Any) -> bool:
    """True if routers replay recorded choices, by megatron-core's setting or by verl's."""
    names = ("moe_enable_routing_replay", "enable_routing_replay")
    return any(getattr(config, name, False) for name in names)


def decoder_block(chunk: torch.nn.Module) -> Any:
    """A chunk's transformer block (``decoder`` of a GPT, ``encoder`` of a BERT), or None."""
    return attribute_of(chunk, "decoder", "encoder")


def gpt_of(chunk: torch.nn.Module) -> Any:
    """The ``GPTModel`` of a chunk; None if it holds another model."""
    module: Any = chunk
    while module is not None and not isinstance(module, GPTModel):
        module = getattr(module, "module", None)
    return module


def tokens_changed(
    given: Mapping[str, Any], change: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The arguments of a forward with those of tokens as ``change(name, tensor)`` makes them."""
    present = {name: given[name] for name in OF_TOKENS if given.get(name) is not None}
    return {**given, **{name: change(name, tensor) for name, tensor in present.items()}}


@contextlib.contextmanager
def rebound(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Give each module another ``forward`` in the block."""
    with contextlib.ExitStack() as around:
        for module, forward in forwards:
            around.callback(vars(module).pop, "forward", None)
            module.forward = forward
        yield
