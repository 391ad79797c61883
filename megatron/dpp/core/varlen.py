"""Kernels of PyTorch and of flash-attention for documents of unlike length, and the causal mask of
a row's last queries.

Queries are the last tokens of what they attend to: causal masks are aligned at the bottom right.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right

_LARGEST_HEAD = 256
"""Largest head size of the kernels."""


class Bounds(NamedTuple):
    """First queries and keys of a row's documents.

    Args:
        queries, keys: int32 [documents + 1] on the device; the last is the end.
        most_queries, most_keys: of the longest document.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int


def kernels_for(query: torch.Tensor, dropout: float = 0.0) -> list[str]:
    """The names in :data:`KERNELS` that can take this query, the preferred one first."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return []
    if size % 8 or size > _LARGEST_HEAD:
        return []
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return []
    torchs = not dropout and imported("torch.nn.attention.varlen", "varlen_attn") is not None
    flash = imported("flash_attn", "flash_attn_varlen_func") is not None
    return ["torch"] * torchs + ["flash"] * flash


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a package, None if it is not there."""
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):
        return None
    return found


@functools.cache
def _options_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *,
    causal: bool, scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.attention.varlen``, whose options differ between PyTorch 2.10 and 2.13."""
    function = imported("torch.nn.attention.varlen", "varlen_attn")
    assert function is not None and not dropout
    known: frozenset[str] = _options_of(function)
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        options["is_causal"] = causal
    usual = 1.0 / math.sqrt(q.shape[-1])
    if "scale" in known:
        options["scale"] = scale
    elif scale != usual:
        q = q * (scale / usual)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    output: torch.Tensor = function(q, k, v, *bounds, **options)
    return output


def _by_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *,
    causal: bool, scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """flash-attention's own function, whose causal mask is aligned bottom right from 2.1 on."""
    function = imported("flash_attn", "flash_attn_varlen_func")
    assert function is not None
    output: torch.Tensor = function(
        q, k, v, *bounds, dropout_p=dropout, softmax_scale=scale, causal=causal
    )
    return output


KERNELS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"torch": _by_torch, "flash": _by_flash_attention}
)
"""Name -> function of query [tokens, np, hn], key and value [tokens, ng, hn], :class:`Bounds`, and
the keywords ``causal``, ``scale`` and ``dropout``. The result is like the query."""


def causal_mask(queries: int, keys: int, like: torch.Tensor) -> Any:
    """The mask by which a row's tokens ``keys - queries`` to ``keys`` attend to its first ``keys``,
    for ``scaled_dot_product_attention`` of tensors like ``like``.
    """
    if like.is_cuda:  # PyTorch then takes a kernel that needs no mask in memory
        return causal_lower_right(queries, keys)
    return _mask(queries, keys)


@functools.lru_cache(maxsize=8)
def _mask(queries: int, keys: int) -> torch.Tensor:
    """One for all layers, since a layer keeps its mask for the backward."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
