"""Prompts as token ids, and the token that ends an answer, by transformers' tokenizers.

Templates and tokenizers come from strangers and may hang in code that no signal interrupts, so they
run in a child process that is killed at a deadline.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, one_line

Chat = list[dict[str, Any]]
SECONDS = 60.0
"""Longest time for all prompts of a call."""
_MEMORY_BYTES = 1 << 33
_ANSWER = "An answer."


def encode(
    folder: Path,
    prompts: Sequence[str | Chat],
    template: str | None = None,
    *,
    seconds: float = SECONDS,
) -> list[list[int]]:
    """Token ids of texts, and of chats up to where the answer begins.

    Args:
        folder: of a tokenizer with the names of transformers.
        template: a chat template in place of the tokenizer's.

    Raises:
        ConfigError: transformers is not installed.
        DataError: a prompt cannot be encoded, or not within the time.
    """
    found: list[list[int]] = _in_child(_encode, (folder, list(prompts), template), folder, seconds)
    return found


def end_of_answers(folder: Path, template: str | None = None, *, seconds: float = SECONDS) -> int:
    """The special token with which the chat template ends an answer.

    Raises:
        ConfigError: transformers is not installed.
        DataError: the template marks no end, or cannot be read within the time.
    """
    end: int | None = _in_child(_end, (folder, template), folder, seconds)
    if end is None:
        raise DataError(f"{folder}: its chat template ends an answer by no special token")
    return end


def tokenizer_of(folder: Path, template: str | None = None) -> Any:
    """transformers' tokenizer of a folder; nothing is downloaded, and no code of the folder runs.

    Raises:
        ConfigError: transformers is not installed.
        DataError: it cannot load the folder.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("transformers is not installed: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a broken file raises anything
        raise DataError(f"{folder}: no tokenizer ({one_line(error, 200)})") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _encode(folder: Path, prompts: list[str | Chat], template: str | None) -> list[list[int]]:
    tokenizer = tokenizer_of(folder, template)
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append(tokenizer(prompt)["input_ids"])
            continue
        ids = tokenizer.apply_chat_template(
            prompt, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        found.append(list(ids))
    return found


def _end(folder: Path, template: str | None) -> int | None:
    tokenizer = tokenizer_of(folder, template)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    _, found, end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(_ANSWER)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if found else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((each for each in ids if each in special), None)


def _in_child(
    work: Callable[..., Any], values: tuple[Any, ...], folder: Path, seconds: float
) -> Any:
    """The result of ``work(*values)`` in a process that is killed after ``seconds``."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, work, values), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise DataError(
                f"{folder}: its tokenizer or chat template takes more than {seconds:g} s"
            )
        found, error = receiver.recv()
    except EOFError:
        child.join()
        raise DataError(
            f"{folder}: its tokenizer or chat template ended the process (status {child.exitcode})"
        ) from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if error is not None:
        raise error
    return found


def _answer(sender: Any, work: Callable[..., Any], values: tuple[Any, ...]) -> None:
    """Run in the child: send the result or the error of ``work``."""
    import transformers  # noqa: F401 - before the bound on memory

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    bounds = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(used + _MEMORY_BYTES, *bounds, 1 << 62), hard))
    try:
        sender.send((work(*values), None))
    except (ConfigError, DataError) as error:
        sender.send((None, error))
    except MemoryError:
        sender.send((None, DataError(f"{values[0]}: its template takes too much memory")))
    except BaseException as error:  # templates and tokenizers raise anything
        sender.send(
            (None, DataError(f"{values[0]}: {type(error).__name__}: {one_line(error, 200)}"))
        )  # type: ignore[arg-type]
