"""``megatron-dpp generate``: a model's answers to prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError, require, require_value
from megatron.dpp.processes import sigint_held_back
from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.generate.model_source import (
    add_model_flags,
    chat_encoder,
    check_ids,
    check_model_flags,
    ends_of,
    find_source,
    opened,
    tokenizer_of,
    vocabulary_of,
)
from megatron.dpp_train.generate.prompts import Prompt, chat_prompts, read_texts, text_prompts
from megatron.dpp_train.tokenizers import Tokenizer


def _parser(prog: str) -> argparse.ArgumentParser:
    text = (
        "Print a model's answers to prompts: one as it is, several as JSON lines. MODEL is a "
        "directory of checkpoints or a Hugging Face folder."
    )
    parser = new_parser(prog, text, "MODEL --prompt TEXT | --prompts FILE | --chat TEXT [options]")
    add_model_flags(parser)
    one_of = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    one_of.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue")
    one_of.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or JSON lines")
    one_of.add_argument("--chat", metavar="TEXT", help="a question, or FILE.jsonl of chats")
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from N tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from this part")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    group.add_argument("--output", type=Path, metavar="FILE", help="JSON lines in place of stdout")
    return parser


def _run(args: argparse.Namespace) -> int:
    with sigint_held_back():
        import torch  # noqa: F401 - before all that needs it
    from megatron.dpp_train.generate.answers import check_lengths, generate
    from megatron.dpp_train.generate.sampling import Sampling

    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    check_model_flags(args)
    most = args.max_new_tokens
    require_value(args, "max_new_tokens", most >= 1, "at least 1")
    require(
        args.chat_template is None or args.chat is not None,
        f"--chat-template {args.chat_template}: needs --chat",
    )
    if args.output is not None:
        _check_output(args.output)
    source = find_source(args.model, args.step, args.engine, args.family_file)
    tokenizer, place = tokenizer_of(source, args.tokenizer)
    encoder = None
    if args.chat is not None:
        encoder = chat_encoder(source, tokenizer, place, args.chat_template)
    prompts = _prompts(args, tokenizer, encoder)
    ids = [prompt.ids for prompt in prompts]
    vocabulary = vocabulary_of(source, tokenizer)
    for number, prompt in enumerate(ids, 1):
        check_ids(prompt, vocabulary, f"prompt {number}")
    if source.positions is not None:
        check_lengths(ids, source.positions)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(opened(source, args, vocabulary))
        print(f"engine: {engine.name}", file=sys.stderr)
        file = args.output and stack.enter_context(_new_file(args.output))
        answers = generate(
            engine,
            ids,
            most=most,
            ends=ends_of(source, tokenizer, None if encoder is None else encoder.end),
            sampling=sampling,
            batch_size=args.batch_size,
        )
        _write(zip(prompts, answers, strict=True), tokenizer, file, alone=len(prompts) == 1)
    return 0


def _prompts(
    args: argparse.Namespace, tokenizer: Tokenizer, encoder: ChatEncoder | None
) -> list[Prompt]:
    if encoder is not None:
        return chat_prompts(args.chat, encoder)
    if args.prompt is not None:
        return text_prompts(args.prompt, tokenizer, "--prompt")
    found = text_prompts(read_texts(args.prompts), tokenizer, f"--prompts {args.prompts}")
    if not found:
        raise DataError(f"--prompts {args.prompts}: holds no prompt")
    return found


def _check_output(path: Path) -> None:
    if path.exists():
        raise DataError(f"--output {path}: exists; name another file")
    if not path.parent.is_dir():
        raise DataError(f"--output {path}: its directory does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DataError(f"--output {path}: its directory cannot be written")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A file that gets its name at the end. After an error its answers stay in ``.unfinished``,
    which the next attempt replaces; without an answer it goes away."""
    scratch = path.with_name(f"{path.name}.unfinished")
    try:
        with open_text_to_write(scratch) as file:
            yield file
    except BaseException:
        if scratch.is_file() and not scratch.stat().st_size:
            scratch.unlink()
        raise
    _check_output(path)
    scratch.rename(path)


def _write(
    answered: Iterable[tuple[Prompt, Any]], tokenizer: Tokenizer, file: Any, *, alone: bool
) -> None:
    """Write answers as they come: into ``file``, or to stdout."""
    for prompt, answer in answered:
        text = _text(tokenizer, prompt.ids, answer.tokens)
        if file is None and alone:
            print(text)
            continue
        line = {**prompt.answered(text), "tokens": len(answer.tokens), "finish": answer.finish}
        print(json.dumps(line, ensure_ascii=False), file=file or sys.stdout, flush=True)


def _text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """The text of an answer; some tokenizers drop the blank at the beginning of a text."""
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(answer)


main = command("megatron-dpp generate", _parser, _run)
