"""The microbatches of a step: what a rank was given, cut as PyTorch's schedules cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.utils._pytree import tree_leaves

from megatron.dpp.errors import ConfigError


@dataclass(frozen=True)
class Microbatches:
    """The inputs of one step on one rank.

    Args:
        args: positional arguments of the first stage; empty on a rank that was given none.
        kwargs: keyword arguments of this rank's stages; empty likewise.
        targets: of the loss function; None without.
        listed: something was given as a list with an item per microbatch.
    """

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    listed: bool = False

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        number: int,
        args_spec: Sequence[Any] | None = None,
        kwargs_spec: Mapping[str, Any] | None = None,
    ) -> Microbatches:
        """Cut a whole batch by the chunk specs, and take lists as they are.

        Args:
            args, kwargs, target: as ``step`` takes them.
            number: of the microbatches of a whole batch; lists have their own.

        Raises:
            ConfigError: lists of unlike length, or a batch with fewer rows than microbatches.
        """
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        lengths = {
            name: len(value)
            for name, value in [*named.items(), ("target", target)]
            if isinstance(value, list)
        }
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigError(f"lists of microbatches need one same number of items: {found}")
        number = next(iter(lengths.values()), number)
        placed = args_spec if args and args_spec else [None] * len(args)
        specs = [*placed, *map((kwargs_spec or {}).get, kwargs)]
        columns = [
            _cut(name, value, spec, number)
            for (name, value), spec in zip(named.items(), specs, strict=True)
        ]
        rows = list(zip(*columns, strict=True))
        return cls(
            args=[row[: len(args)] for row in rows] if args else (),
            kwargs=[dict(zip(kwargs, row[len(args) :], strict=True)) for row in rows],
            targets=None if target is None else _cut("target", target, None, number),
            listed=bool(lengths),
        )

    def arguments(self, microbatch: int) -> tuple[Any, ...]:
        """Positional arguments of the first stage."""
        return self.args[microbatch] if self.args else ()

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        """Keyword arguments of this rank's stages."""
        return self.kwargs[microbatch] if self.kwargs else {}

    def sizes(self) -> list[int]:
        """The size of each microbatch, as far as they are known here: elements of its first tensor
        (tokens, where that holds their numbers).
        """
        found = []
        for i in range(max(len(self.args), len(self.kwargs))):
            leaves = tree_leaves((self.arguments(i), self.keywords(i)))
            tensors = (leaf for leaf in leaves if torch.is_tensor(leaf))
            found.append(max(1, next((tensor.numel() for tensor in tensors), 1)))
        return found


def _cut(name: str, value: Any, spec: Any, number: int) -> Sequence[Any]:
    """The items of a list, or what each microbatch has of a value of the whole batch.

    Raises:
        ConfigError: the batch has too few rows.
    """
    if isinstance(value, list):
        return value
    specs = None if spec is None else (spec,)
    cut, _ = split_args_kwargs_into_chunks((value,), None, number, specs)
    if len(cut) != number:
        raise ConfigError(
            f"{name} can be cut into {len(cut)} microbatches, and {number} are asked for: give as "
            "many rows, or a list of microbatches"
        )
    return [each for (each,) in cut]
