"""Hugging Face models as checkpoints of Megatron, and back.

The names here load PyTorch only when a conversion needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.dpp_train.hf.folder import read_model

if TYPE_CHECKING:
    from megatron.dpp_train.hf.convert import to_hf, to_megatron

__all__ = ["flags_of", "to_hf", "to_megatron"]


def flags_of(folder: str | Path, *, tensor_parallel: int = 1) -> list[str]:
    """Megatron's flags of the model in a folder, as words of a command line.

    Args:
        folder: with a ``config.json``.
        tensor_parallel: ranks that must divide the rows of the vocabulary, which is padded.

    Raises:
        DataError: there is no ``config.json``, or a model of this kind cannot be trained here.
    """
    return read_model(Path(folder)).words(tensor_parallel)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from megatron.dpp_train.hf import convert

    return getattr(convert, name)
