"""Files that a trained model keeps of its run beside its weights: tokenizer, chat template, and the
token that ends an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, shown
from megatron.dpp_train.checkpoint import durable
from megatron.dpp_train.hf.fields import CONFIG
from megatron.dpp_train.text_files import read_object
from megatron.dpp_train.tokenizers import Tokenizer, template_files, tokenizer_for
from megatron.dpp_train.tokenizers.base import OLDER_FILES
from megatron.dpp_train.tokenizers.template_files import find_templates, templates_beside
from megatron.dpp_train.tokenizers.templates import ChatTemplate, last_token

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *(*OLDER_FILES, *template_files.TEMPLATE_FILES),
)
"""Files of a tokenizer, as far as it has them."""
GENERATION = "generation_config.json"


def keep_run_files(saved: Any, folder: Path) -> tuple[str, ...]:
    """Put the tokenizer of a run and its chat template into a model's folder, in the place of those
    of the model that it started from. Where it trained on chats, ``generation_config.json`` names
    the token that ends an answer, too.

    Args:
        saved: arguments of the run.

    Returns:
        Notes for the user.

    Raises:
        DataError: a file in ``folder`` is broken.
    """
    try:
        tokenizer = tokenizer_for(saved)
        if not tokenizer.keeps(getattr(saved, "tokenizer_tokens", None)):
            raise DataError(f"{_vocabulary(saved)} has other tokens now than when the run began")
        templates = _templates(saved) if getattr(saved, "sft", False) else {}
    except (ConfigError, DataError) as error:
        return (f"tokenizer and chat template are not the run's, but its first model's ({error})",)
    place = _place(saved)
    if place is not None:
        for name in TOKENIZER_FILES:
            copy_file(place, folder, name)
    if templates:
        if templates_beside(folder) != templates:
            _write_templates(templates, folder)
        _add_end(ChatTemplate(templates["default"], tokenizer.template_tokens()), tokenizer, folder)
    return ()


def copy_file(source: Path, target: Path, name: str) -> None:
    """Copy a file of one folder into another, if it is there."""
    if (source / name).is_file():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def end_ids(folder: Path) -> list[int]:
    """Tokens that end a text: those of ``generation_config.json``, or else of ``config.json``.

    Raises:
        DataError: a file is broken.
    """
    found: Any = None
    for name in (GENERATION, CONFIG):
        if found is None:
            found = read_object(folder / name).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int for end in ends):
        raise DataError(f"{folder}: eos_token_id is {shown(found)}, expected numbers of tokens")
    return ends


def _vocabulary(saved: Any) -> str | None:
    return getattr(saved, "tokenizer_model", None) or getattr(saved, "vocab_file", None)


def _place(saved: Any) -> Path | None:
    """The folder of a run's tokenizer."""
    path = Path(_vocabulary(saved) or "")
    if not path.name:
        return None
    return path if path.is_dir() else path.parent


def _templates(saved: Any) -> dict[str, str]:
    form = getattr(saved, "sft_tokenizer_prompt_format", None) or "auto"
    return find_templates(form, _vocabulary(saved))


def _write_templates(templates: dict[str, str], folder: Path) -> None:
    names = {"default": template_files.FILE, template_files.TOOL_USE: template_files.TOOL_FILE}
    for name, file in names.items():
        (folder / file).unlink(missing_ok=True)
        if name in templates:
            (folder / file).parent.mkdir(exist_ok=True)
            durable.write_text(folder / file, templates[name])
    content = read_object(folder / template_files.CONFIG)
    if content.pop("chat_template", None) is not None:
        durable.write_text(folder / template_files.CONFIG, f"{json.dumps(content, indent=2)}\n")


def _add_end(template: ChatTemplate, tokenizer: Tokenizer, folder: Path) -> None:
    end, ends = last_token(template, tokenizer), end_ids(folder)
    if end is None or end in ends:
        return
    path = folder / GENERATION
    content = read_object(path)
    if not content:
        known = read_object(folder / CONFIG)
        content = {name: known[name] for name in ("bos_token_id", "pad_token_id") if name in known}
    content.pop("_from_model_config", None)  # transformers may make such a file anew
    content["eos_token_id"] = [*ends, end] if ends else end
    durable.write_text(path, f"{json.dumps(content, indent=2)}\n")
