"""The interface between generation, evaluation and the model that they ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch

from megatron.dpp.errors import ConfigError

Tokens = Sequence[int]
LOSS_ROWS = 1024
"""Tokens whose logits are held together where losses are computed."""


class Engine(Protocol):
    """A model in one process.

    Attributes:
        name: one line that says what computes, in which dtype and where.
        positions: tokens that a sequence may have.
    """

    name: str
    positions: int

    def begin(self, prompts: Sequence[Tokens], room: int) -> torch.Tensor:
        """Read prompts, which become sequences 0, 1, ...

        Args:
            room: tokens that each sequence may get, with its prompt.

        Returns:
            Logits of the token behind each, fp32 [prompts, vocabulary].
        """

    def extend(self, tokens: Tokens) -> torch.Tensor:
        """Add a token to each sequence; logits of the next one, as :meth:`begin`."""

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all sequences but these, which become 0, 1, ..."""

    def losses(self, pieces: Sequence[Tokens]) -> list[torch.Tensor]:
        """The loss of each token but the first of each piece, fp32 [tokens - 1] on the CPU."""


def default_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes the GPU that is there.

    Raises:
        ConfigError: ``cuda`` without a GPU.
    """
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    return ("cuda" if there else "cpu") if device == "auto" else device


def default_dtype(device: str) -> str:
    """``bfloat16`` on a GPU, ``float32`` on a CPU."""
    return "bfloat16" if default_device(device) == "cuda" else "float32"


def check_room(needed: int, device: torch.device, of: str, remedy: str) -> None:
    """Refuse what does not fit.

    Args:
        needed: bytes.
        of: their purpose, for the error.

    Raises:
        ConfigError: naming the bytes needed and free.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{of}: {needed:,} bytes ({needed / 2**30:.1f} GiB), {device} has {free:,} free "
            f"({free / 2**30:.1f} GiB); {remedy}"
        )


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropies in fp32, some rows at a time; logits [t, vocabulary], labels [t]."""
    parts = [
        torch.nn.functional.cross_entropy(some.float(), wanted, reduction="none")
        for some, wanted in zip(
            torch.split(logits, LOSS_ROWS), torch.split(labels, LOSS_ROWS), strict=True
        )
    ]
    return torch.cat(parts).cpu()
