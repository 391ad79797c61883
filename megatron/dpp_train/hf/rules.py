"""Joins the tensors of a row of ``hf.tables`` into Megatron's, and splits them again.

Megatron fuses queries, keys and values by group: the queries of a group, its key, its value, then
the next group. Hugging Face keeps them apart, or fuses all queries, all keys, all values (GPT-2).

A rule is one word or two: ``turned`` matrices are transposed; ``stacked`` ones (gate and up
projection) are behind each other, ``pairs`` of their rows take turns; ``by_group`` joins queries,
keys and values, of one tensor in ``same_by_group``. ``same``: as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf.families import Sizes


def join(rule: str, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The Megatron tensor of these Hugging Face tensors."""
    if rule.startswith("turned"):
        parts = [part.mT for part in parts]
    whole, rest = parts[0], parts[0].shape[1:]
    if rule.endswith("by_group"):
        if len(parts) == 1:
            parts = torch.split_with_sizes(whole, [sizes.queries, sizes.keys, sizes.keys])
        grouped = [part.reshape(sizes.groups, -1, *rest) for part in parts]
        whole = torch.cat(grouped, dim=1).reshape(sizes.fused, *rest)
    elif rule.endswith("pairs"):
        whole = torch.cat([whole[:, 0::2], whole[:, 1::2]], 1)
    elif rule == "stacked":
        whole = torch.cat(list(parts))
    return whole.contiguous()


def split(rule: str, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """The Hugging Face tensors of a Megatron tensor; some are views of it."""
    parts = [whole]
    if rule.endswith("by_group"):
        widths = [sizes.queries // sizes.groups, sizes.head, sizes.head]
        grouped = whole.reshape(sizes.groups, -1, *whole.shape[1:])
        found = torch.split_with_sizes(grouped, widths, dim=1)
        parts = [part.reshape(-1, *whole.shape[1:]) for part in found]
        parts = parts if rule == "by_group" else [torch.cat(parts)]
    elif rule.endswith("pairs"):
        parts = [torch.stack(whole.chunk(2, 1), 2).flatten(1, 2)]
    elif rule == "stacked":
        parts = list(whole.chunk(2))
    return [part.mT for part in parts] if rule.startswith("turned") else parts


def cast(tensor: torch.Tensor, kind: torch.dtype, name: str) -> torch.Tensor:
    """A tensor in another type.

    Raises:
        DataError: a number of it is beyond the type, which would make it infinite.
    """
    found = tensor.to(kind)
    if kind == torch.float16 != tensor.dtype:
        largest = torch.where(tensor.isfinite(), tensor, 0).abs().max()
        if largest.to(kind).isinf():
            raise DataError(
                f"{name} holds {float(largest):g}, and float16 ends at "
                f"{torch.finfo(kind).max:g}: choose another --dtype"
            )
    return found
