"""Names of ranks and of slices in reports, in the terms of ``docs/glossary.md``."""

from __future__ import annotations

from collections.abc import Sequence


def place_name(
    stage: int, replica: int | None, tensor: int | None, context: int | None = None
) -> str:
    """``stage 1, replica 0, tensor rank 1``; None for what the job has only one of."""
    parts = {
        "stage": stage, "replica": replica, "tensor rank": tensor, "context rank": context,
    }  # fmt: skip
    return ", ".join(f"{what} {number}" for what, number in parts.items() if number is not None)


def full_name(
    rank: int, stage: int, replica: int | None, tensor: int | None, context: int | None = None
) -> str:
    """A rank by its place and number: ``stage 1, replica 0 (rank 2)``."""
    return f"{place_name(stage, replica, tensor, context)} (rank {rank})"


def slice_names(groups: Sequence[int]) -> list[str]:
    """The ends of the labels of each unit's tasks: `` s2/3`` for the second of three slices.

    >>> slice_names([1, 2])
    ['', ' s1/2', ' s2/2']
    """
    return [f" s{i + 1}/{number}" * (number > 1) for number in groups for i in range(number)]
