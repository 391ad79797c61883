"""Causal attention of a row's last queries to all of its keys, by the kernels of PyTorch and flash.

The queries of a slice are the last tokens of what they attend to, so the causal mask is aligned at
its bottom right. A packed row holds several documents; only the first of them may have keys before
the slice.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

_LARGEST_HEAD = 256
"""Largest head size of the variable-length kernels."""


class Span(NamedTuple):
    """One document's queries and keys, as indices ``[begin, end)`` into those of a slice."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int

    @property
    def num_queries(self) -> int:
        """Queries of the document in the slice."""
        return self.last_query - self.first_query

    @property
    def num_keys(self) -> int:
        """Keys of the document up to the end of the slice."""
        return self.last_key - self.first_key


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attend within each document.

    A row of several documents runs in the first of these that is there: PyTorch's variable-length
    attention, flash-attention's, one document after the other. One document, and a CPU, take
    ``scaled_dot_product_attention``.

    Args:
        query: [s, b, np, hn].
        key, value: [k, b, ng, hn], of which np is a multiple of ng.
        spans: the documents, which cover all queries and keys; several need b of 1.
        scale: factor of the scores.
        dropout: share of the attention that is dropped.
        kernel: ``sdpa``, or one of :func:`kernels_for`, in the place of this choice.

    Returns:
        [s, b, np * hn].
    """
    names = kernels_for(query, dropout)
    chosen = kernel or (names[0] if names and len(spans) > 1 else "sdpa")
    if chosen != "sdpa":
        q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
        output = _VARLEN[chosen](q, k, v, spans, scale=scale, dropout=dropout)
        return output.reshape(len(query), 1, -1)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, span.first_query : span.last_query],
            k[:, :, span.first_key : span.last_key],
            v[:, :, span.first_key : span.last_key],
            attn_mask=_causal(span.num_queries, span.num_keys, query),
            is_causal=span.num_queries == span.num_keys,
            dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )
        for span in spans
    ]  # fmt: skip
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def _causal(queries: int, keys: int, like: torch.Tensor) -> Any:
    """The causal mask, aligned bottom right; None where the kernel's own is aligned so."""
    if queries == keys:
        return None
    if like.is_cuda:  # PyTorch then takes a kernel that needs no mask in memory
        return causal_lower_right(queries, keys)
    return _mask(queries, keys)


@functools.lru_cache(maxsize=8)
def _mask(queries: int, keys: int) -> torch.Tensor:
    """One for all layers, since a layer keeps its mask for the backward."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def kernels_for(query: torch.Tensor, dropout: float = 0.0) -> list[str]:
    """The variable-length kernels that this query can take, the preferred one first."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return []
    capable = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if not capable or size % 8 or size > _LARGEST_HEAD:
        return []
    torchs = not dropout and _imported("torch.nn.attention.varlen", "varlen_attn") is not None
    flash = _imported("flash_attn", "flash_attn_varlen_func") is not None
    return ["torch"] * torchs + ["flash"] * flash


@functools.cache
def _imported(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a package, None if it is not there."""
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):
        return None
    return found


def _bounds(spans: Sequence[Span], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First queries and first keys of the documents, and their ends, int32 on the device."""
    queries = [0, *(span.last_query for span in spans)]
    keys = [0, *(span.last_key for span in spans)]
    queries_of, keys_of = torch.tensor([queries, keys], dtype=torch.int32).to(like.device)
    return queries_of, keys_of


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Sequence[Span], *,
    scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.attention.varlen``, whose options differ between PyTorch 2.10 and 2.13."""
    function = _imported("torch.nn.attention.varlen", "varlen_attn")
    assert function is not None and not dropout
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
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
    most = max(span.num_queries for span in spans), max(span.num_keys for span in spans)
    output: torch.Tensor = function(q, k, v, *_bounds(spans, q), *most, **options)
    return output


def _by_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Sequence[Span], *,
    scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """flash-attention's own function, whose causal mask is aligned bottom right from 2.1 on."""
    function = _imported("flash_attn", "flash_attn_varlen_func")
    assert function is not None
    most = max(span.num_queries for span in spans), max(span.num_keys for span in spans)
    output: torch.Tensor = function(
        q, k, v, *_bounds(spans, q), *most, dropout_p=dropout, softmax_scale=scale, causal=True
    )
    return output


_VARLEN: dict[str, Callable[..., torch.Tensor]] = {
    "torch": _by_torch,
    "flash": _by_flash_attention,
}
