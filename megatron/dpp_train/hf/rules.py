"""Joins the tensors of a row of ``hf.tables`` into Megatron's, and splits them again.

Megatron fuses queries, keys and values by group: the queries of a group, its key, its value, then
the next group. Hugging Face keeps them apart, or fuses all queries, all keys, all values (GPT-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf.families import Sizes

Tensors = Sequence[torch.Tensor]


def join(rule: str, parts: Tensors, sizes: Sizes) -> torch.Tensor:
    """The Megatron tensor of these Hugging Face tensors."""
    return _RULES[rule][0](parts, sizes).contiguous()


def split(rule: str, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """The Hugging Face tensors of a Megatron tensor; some are views of it."""
    return _RULES[rule][1](whole, sizes)


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


def _by_group(parts: Tensors, sizes: Sizes) -> torch.Tensor:
    rest = parts[0].shape[1:]
    grouped = [part.reshape(sizes.groups, -1, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(sizes.fused, *rest)


def _out_of_groups(whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    rest = whole.shape[1:]
    grouped = whole.reshape(sizes.groups, -1, *rest)
    queries = sizes.queries // sizes.groups
    found = torch.split_with_sizes(grouped, [queries, sizes.head, sizes.head], dim=1)
    return [part.reshape(-1, *rest) for part in found]


def _apart(fused: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    return list(torch.split_with_sizes(fused, [sizes.queries, sizes.keys, sizes.keys]))


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Gate and up projection behind each other, of those that take turns along the second axis."""
    return torch.cat([pairs[:, 0::2], pairs[:, 1::2]], 1)


def _pairs(halves: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_halves`."""
    return torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)


_Join = Callable[[Tensors, Sizes], torch.Tensor]
_Split = Callable[[torch.Tensor, Sizes], list[torch.Tensor]]
_RULES: dict[str, tuple[_Join, _Split]] = {
    "same": (lambda parts, _: parts[0], lambda whole, _: [whole]),
    "turned": (lambda parts, _: parts[0].mT, lambda whole, _: [whole.mT]),
    "turned_pairs": (
        lambda parts, _: _halves(parts[0].mT),
        lambda whole, _: [_pairs(whole).mT],
    ),
    "pairs": (lambda parts, _: _halves(parts[0]), lambda whole, _: [_pairs(whole)]),
    "stacked": (lambda parts, _: torch.cat(list(parts)), lambda whole, _: list(whole.chunk(2))),
    "by_group": (_by_group, _out_of_groups),
    "fused_by_group": (
        lambda parts, sizes: _by_group(_apart(parts[0], sizes), sizes),
        lambda whole, sizes: [torch.cat(_out_of_groups(whole, sizes))],
    ),
    "turned_by_group": (
        lambda parts, sizes: _by_group(_apart(parts[0].t(), sizes), sizes),
        lambda whole, sizes: [torch.cat(_out_of_groups(whole, sizes)).t()],
    ),
}
