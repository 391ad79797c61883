"""Causal attention within documents of unlike length, by PyTorch's kernels.

The queries of a slice are the last tokens of what they attend to, so the causal mask is aligned at
its bottom right. A packed row holds several documents; only the first of them may have keys before
the slice.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

_LARGEST_HEAD = 256
"""Largest head size of the kernel."""


class DocumentBounds(NamedTuple):
    """First queries and keys of a row's documents.

    Args:
        queries, keys: int32 [documents + 1] on the device; the last is the end.
        most_queries, most_keys: of the longest document.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int


class DocumentSpan(NamedTuple):
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

    @property
    def starts_here(self) -> bool:
        """The document has no keys before the slice."""
        return self.num_queries == self.num_keys


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: DocumentBounds, *, scale: float
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[DocumentSpan],
    *,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend within each document.

    A row of several documents runs in PyTorch's variable-length attention, where that can take it.
    Otherwise each document takes ``scaled_dot_product_attention``.

    Args:
        query: [s, b, np, hn].
        key, value: [k, b, ng, hn], of which np is a multiple of ng.
        spans: the documents, which cover all queries and keys; several need b of 1.
        scale: factor of the scores.
        dropout: share of the attention that is dropped.

    Returns:
        [s, b, np * hn].
    """
    if len(spans) > 1 and can_take(query, dropout):
        q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
        output = attend_documents(q, k, v, _bounds(tuple(spans), query.device), scale=scale)
        return output.reshape(len(query), 1, -1)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, span.first_query : span.last_query],
            k[:, :, span.first_key : span.last_key],
            v[:, :, span.first_key : span.last_key],
            attn_mask=None if span.starts_here else causal_mask(span.num_queries, span.num_keys, q),
            is_causal=span.starts_here,
            dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )
        for span in spans
    ]  # fmt: skip
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


@functools.lru_cache(maxsize=16)
def _bounds(spans: tuple[DocumentSpan, ...], device: torch.device) -> DocumentBounds:
    """The same tensors for all layers: each copy to a device costs a launch."""
    queries = [0, *(span.last_query for span in spans)]
    keys = [0, *(span.last_key for span in spans)]
    firsts = torch.tensor([queries, keys], dtype=torch.int32)
    if device.type == "cuda":  # without a wait for the device
        firsts = firsts.pin_memory().to(device, non_blocking=True)
    first_queries, first_keys = firsts
    return DocumentBounds(
        first_queries,
        first_keys,
        max(span.num_queries for span in spans),
        max(span.num_keys for span in spans),
    )
