"""Names of ranks in reports: stage, replica and tensor rank, the terms of ``docs/glossary.md``."""

from __future__ import annotations


def place_name(stage: int, replica: int | None, tensor: int | None) -> str:
    """``stage 1, replica 0, tensor rank 1``; None for what the job has only one of."""
    parts = {"stage": stage, "replica": replica, "tensor rank": tensor}
    return ", ".join(f"{what} {number}" for what, number in parts.items() if number is not None)


def full_name(rank: int, stage: int, replica: int | None, tensor: int | None) -> str:
    """A rank by its place and number: ``stage 1, replica 0 (rank 2)``."""
    return f"{place_name(stage, replica, tensor)} (rank {rank})"
