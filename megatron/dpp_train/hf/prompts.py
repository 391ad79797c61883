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
    folder: Path, prompts: Sequence[str | Chat], template: str | None
) -> tuple[list[list[int]], int | None]:
    """Token ids of texts, and of chats up to where the answer begins; with chats, also the token
    that ends an answer, as of :func:`end_of_answers`.

    Args:
        folder: of a tokenizer with the names of transformers.
        template: a chat template in place of the tokenizer's.

    Raises:
        ConfigError: transformers is not installed.
        DataError: a prompt cannot be encoded, or takes too much time or memory.
    """
    found: tuple[list[list[int]], int | None] = _in_child(_ids, folder, template, list(prompts))
    return found


def end_of_answers(folder: Path, template: str | None = None) -> int | None:
    """The special token with which the chat template ends an answer; None where it has none.

    Raises:
        ConfigError: transformers is not installed.
        DataError: the template cannot be read, or takes too much time or memory.
    """
    end: int | None = _in_child(_end, folder, template)
    return end


def _ids(tokenizer: Any, prompts: list[str | Chat]) -> tuple[list[list[int]], int | None]:
    ask = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    found = [
        tokenizer(each)["input_ids"]
        if isinstance(each, str)
        else list(tokenizer.apply_chat_template(each, **ask))
        for each in prompts
    ]
    return found, None if all(isinstance(each, str) for each in prompts) else _end(tokenizer)


def _end(tokenizer: Any, request: None = None) -> int | None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    _, found, end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(_ANSWER)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if found else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((each for each in ids if each in special), None)


def _in_child(
    work: Callable[[Any, Any], Any], folder: Path, template: str | None, request: Any = None
) -> Any:
    """The result of ``work`` with the folder's tokenizer and the request."""
    prepare(__name__, "transformers.models.auto.tokenization_auto", "transformers.modeling_utils")
    try:
        with contextlib.closing(Child(partial(_begin, work, folder, template, SECONDS))) as child:
            child.send(request)
            return child.receive()
    except Died as error:
        raise DataError(f"{folder}: its tokenizer or chat template: {error}") from error


def _begin(
    work: Callable[[Any, Any], Any], folder: Path, template: str | None, seconds: float
) -> Callable[[Any], Any]:
    tokenizer = of_transformers(folder)
    if template is not None:
        tokenizer.chat_template = template

    def answer(request: Any) -> Any:
        limit_time(seconds)
        try:
            return work(tokenizer, request)
        except MemoryError:
            raise
        except Exception as error:  # templates and tokenizers raise anything
            raise DataError(f"{folder}: {type(error).__name__}: {one_line(error, 200)}") from error

    return answer
