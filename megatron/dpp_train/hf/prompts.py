"""Prompts as token ids, and the token that ends an answer, by transformers' tokenizers.

Templates and tokenizers come from strangers, so they work in a child process that the kernel ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line
from megatron.dpp_train.data.child import Child, Died, limit_time, prepare
from megatron.dpp_train.data.tokenizer import of_transformers

Chat = list[dict[str, Any]]
SECONDS = 60.0
"""Processor time for all prompts of a call."""
_ANSWER = "An answer."


def encode(
    folder: Path, prompts: Sequence[str | Chat], template: str | None = None
) -> tuple[list[list[int]], int | None]:
    """Token ids of texts, and of chats up to where the answer begins; but with texts alone, also
    the special token with which the chat template ends an answer, or None.

    Args:
        folder: of a tokenizer with the names of transformers.
        template: a chat template in place of the tokenizer's.

    Raises:
        ConfigError: transformers is not installed.
        DataError: a prompt cannot be encoded, or takes too much time or memory.
    """
    prepare(__name__, "transformers.models.auto.tokenization_auto", "transformers.modeling_utils")
    try:
        with contextlib.closing(Child(partial(_begin, folder, template, SECONDS))) as child:
            child.send(list(prompts))
            found: tuple[list[list[int]], int | None] = child.receive()
            return found
    except Died as error:
        raise DataError(f"{folder}: its tokenizer or chat template: {error}") from error


def _begin(folder: Path, template: str | None, seconds: float) -> Callable[[Any], Any]:
    tokenizer = of_transformers(folder)
    if template is not None:
        tokenizer.chat_template = template

    def answer(prompts: list[str | Chat]) -> tuple[list[list[int]], int | None]:
        limit_time(seconds)
        try:
            texts = [isinstance(each, str) for each in prompts]
            end = None if texts and all(texts) else _end(tokenizer)
            return [_ids(tokenizer, each) for each in prompts], end
        except MemoryError:
            raise
        except Exception as error:  # templates and tokenizers raise anything
            raise DataError(f"{folder}: {type(error).__name__}: {one_line(error, 200)}") from error

    return answer


def _ids(tokenizer: Any, prompt: str | Chat) -> list[int]:
    if isinstance(prompt, str):
        found: list[int] = tokenizer(prompt)["input_ids"]
        return found
    ask = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(prompt, **ask))


def _end(tokenizer: Any) -> int | None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    _, found, end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(_ANSWER)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if found else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((each for each in ids if each in special), None)
