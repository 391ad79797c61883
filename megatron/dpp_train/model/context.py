"""Context parallelism of the local layers: each rank holds a part of every sequence.

megatron-core cuts a row of tokens into two chunks per rank. Rank r of n holds chunk r and chunk
2n - 1 - r, so that causal attention costs all ranks the same. Here keys and values are gathered
from all ranks, in the order of the row, and each chunk of queries attends to those up to its end.
The gradients of keys and values are summed and scattered in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron.dpp.core.varlen import causal_mask


def chunk_numbers(group: Any) -> tuple[int, int]:
    """The chunks of a row that this rank of a context-parallel group holds."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def own_part(row: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of a row of tokens, [tokens, ...]."""
    chunks = row.chunk(2 * group.size())
    return torch.cat([chunks[number] for number in chunk_numbers(group)])


def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole row of which each rank has a part, [tokens / ranks, ...] -> [tokens, ...]."""
    chunks = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
    return torch.cat([*chunks[::2], *chunks[::-2]])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Any,
    *,
    scale: float,
    dropout: float = 0.0,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks.

    Args:
        query: [s / ranks, b, np, hn]; ``key`` and ``value`` are [s / ranks, b, ng, hn].
        group: the context-parallel ranks.
        scale: factor of the scores.
        dropout: share of the attention that is dropped.
        allowed: bool [s, s], True where a query may see a key, within the causal mask; None allows
            all of it.

    Returns:
        [s / ranks, b, np * hn].
    """
    key, value = gathered(key, group), gathered(value, group)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    size, parts = len(query) // 2, []
    for number, chunk in zip(chunk_numbers(group), q.chunk(2, dim=2), strict=True):
        begin, end = number * size, (number + 1) * size
        part = F.scaled_dot_product_attention(
            chunk, k[:, :, :end], v[:, :, :end],
            attn_mask=(
                causal_mask(size, end, query) if allowed is None else allowed[begin:end, :end]
            ),
            dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        parts.append(part)
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
