"""transformers' model of a Hugging Face folder, of any kind that it knows; a sequence at a time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp_train.generate.engine import (
    Tokens,
    check_room,
    default_device,
    default_dtype,
    token_losses,
)
from megatron.dpp_train.hf.weights import INDEX, WEIGHTS, loaded_bytes

_NO_LIMIT = 1 << 31
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def is_installed() -> bool:
    """True if transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def check_installed() -> None:
    """Raises ConfigError without transformers."""
    if not is_installed():
        raise ConfigError("--engine transformers: not installed; pip install transformers")


class TransformersEngine:
    """An :class:`~megatron.dpp_train.generate.engine.Engine` on a model of transformers.

    Args:
        folder: of the model; nothing is downloaded, and no code of the folder runs.

    Raises:
        ConfigError: transformers is not installed, there is no GPU, or not the memory.
        DataError: it cannot load the folder.
    """

    def __init__(self, folder: Path, device: str, dtype: str | None) -> None:
        check_installed()
        transformers: Any = importlib.import_module("transformers")

        self._device = torch.device(default_device(device))
        kind = getattr(torch, dtype or default_dtype(device))
        is_known = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
        size = loaded_bytes(folder, kind.itemsize) if is_known else 0
        check_room(size, self._device, f"the weights in {folder}", "use a device with more memory")
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise DataError(f"{folder}: transformers cannot load it ({one_line(error)})") from error
        self._model = model.to(self._device).eval()
        settings = self._model.config.get_text_config()
        known = (getattr(settings, name, None) for name in _POSITIONS)
        self.positions = next((int(each) for each in known if each), _NO_LIMIT)
        self.name = f"transformers {transformers.__version__}, {kind}, {self._device}"
        self._kept: list[Any] = []

    def begin(self, prompts: Sequence[Tokens], room: int) -> torch.Tensor:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        self._kept = [None] * len(prompts)
        return self._step(prompts)

    def extend(self, tokens: Tokens) -> torch.Tensor:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        return self._step([[token] for token in tokens])

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        self._kept = [self._kept[row] for row in rows]

    @torch.inference_mode()
    def losses(self, pieces: Sequence[Tokens]) -> list[torch.Tensor]:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        found = []
        for piece in pieces:
            ids = torch.tensor(piece, device=self._device)
            logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(token_losses(logits, ids[1:]))
        return found

    @torch.inference_mode()
    def _step(self, new: Sequence[Tokens]) -> torch.Tensor:
        found = []
        for row, tokens in enumerate(new):
            ids = torch.tensor([tokens], device=self._device)
            output = self._model(
                input_ids=ids, past_key_values=self._kept[row], use_cache=True, logits_to_keep=1
            )
            self._kept[row] = output.past_key_values
            found.append(output.logits[0, -1].float())
        return torch.stack(found)
