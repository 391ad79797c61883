"""PyTorch's attention over documents of unlike length, and the causal mask of a row's last queries.

Queries are the last tokens of what they attend to: causal masks are aligned at the bottom right.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right

_LARGEST_HEAD = 256
"""Largest head size of the kernel."""


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


@functools.cache
def kernel() -> Callable[..., torch.Tensor] | None:
    """PyTorch's variable-length attention, in the form that it has from 2.12 on; None without."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except (ImportError, OSError):
        return None
    function: Callable[..., torch.Tensor] = module.varlen_attn
    wanted = {"scale", "window_size", "enable_gqa"}
    return function if wanted <= inspect.signature(function).parameters.keys() else None


def can_take(query: torch.Tensor, dropout: float = 0.0) -> bool:
    """True if :func:`attend_documents` can take this query: half precision on a GPU, no dropout."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or dropout:
        return False
    if size % 8 or size > _LARGEST_HEAD:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0) and kernel() is not None


def attend_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scale: float
) -> torch.Tensor:
    """Causal attention within each document: query [tokens, np, hn], key and value
    [tokens, ng, hn]. The result is like the query.
    """
    function, shares = kernel(), q.shape[1] != k.shape[1]
    assert function is not None
    return function(q, k, v, *bounds, scale=scale, window_size=(-1, 0), enable_gqa=shares)


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
