"""``megatron-dpp evaluate``: a model's perplexity on a file, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import ConfigError, DataError, one_line, require_value
from megatron.dpp.index_files import check_index
from megatron.dpp.processes import sigint_held_back
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.data.json_lines import BadLine, text_of
from megatron.dpp_train.generate.model_source import (
    Source,
    add_model_flags,
    chat_encoder,
    check_ids,
    check_model_flags,
    exported,
    find_source,
    opened,
    tokenizer_of,
    vocabulary_of,
)
from megatron.dpp_train.generate.prompts import LINES, encode, json_lines
from megatron.dpp_train.text_files import nearest_path, read_text
from megatron.dpp_train.tokenizers import NullTokenizer, Tokenizer

if TYPE_CHECKING:
    from megatron.dpp_train.generate.losses import Document

_WINDOW = 2048


def _parser(prog: str) -> argparse.ArgumentParser:
    text = (
        "Print a model's loss and perplexity on a file, or its scores on tasks. MODEL is a "
        "directory of checkpoints or a Hugging Face folder."
    )
    parser = new_parser(prog, text, "MODEL --data FILE | --tasks NAMES [options]")
    add_model_flags(parser)
    group = parser.add_argument_group("perplexity")
    group.add_argument(
        "--data", metavar="FILE", help="text, JSON lines (texts or chats), or a prefix of tokens"
    )
    group.add_argument(
        "--window", type=int, metavar="N", help=f"tokens read together (default {_WINDOW})"
    )
    group.add_argument(
        "--stride", type=int, metavar="N", help="tokens between windows (default: half of one)"
    )
    group = parser.add_argument_group("lm-evaluation-harness")
    group.add_argument("--tasks", metavar="NAMES", help="such as hellaswag,piqa, or a FILE.yaml")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="documents of --data, samples of each task"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(args: argparse.Namespace) -> int:
    if not (args.data or args.tasks):
        raise ConfigError("nothing to evaluate: give --data FILE or --tasks NAMES")
    check_model_flags(args)
    few = args.limit is None or args.limit >= 1
    require_value(args, "limit", few, "at least 1")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "--tasks: lm-evaluation-harness is not installed; pip install lm_eval[hf]"
        )
    source = find_source(args.model, args.step, args.engine, args.family_file)
    found: dict[str, Any] = {}
    if args.data:
        found |= _perplexity(args, source)
    if args.tasks:
        found |= _tasks(args, source)
    if args.json:
        print(json.dumps(found))
    return 0


# --- perplexity ---


def _perplexity(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    with sigint_held_back():
        import torch  # noqa: F401 - before all that needs it
    from megatron.dpp_train.generate.losses import check_windows, total_loss

    tokenizer, place = tokenizer_of(source, args.tokenizer)
    every = _documents(
        args.data, tokenizer, lambda: chat_encoder(source, tokenizer, place, args.chat_template)
    )
    documents = list(itertools.islice(every, args.limit))
    vocabulary = vocabulary_of(source, tokenizer)
    for document in documents:
        check_ids(document.ids, vocabulary, f"--data {args.data}")
    if source.positions is not None:
        check_windows(*_windows(args, source.positions), source.positions)
    with opened(source, args, vocabulary) as engine:
        print(f"engine: {engine.name}", file=sys.stderr)
        window, stride = _windows(args, engine.positions)
        check_windows(window, stride, engine.positions)
        totals = total_loss(
            engine, documents, window=window, stride=stride, batch_size=args.batch_size
        )
    if not totals.tokens:
        raise DataError(f"--data {args.data}: no document has two tokens, so there is no loss")
    size = sum(text_bytes(each, tokenizer) for each in documents)
    found = {
        "tokens": totals.tokens,
        "loss": totals.mean,
        "perplexity": totals.perplexity if math.isfinite(totals.perplexity) else None,
        "bits_per_byte": totals.loss / math.log(2) / size if size else None,
        "window": window,
        "stride": stride,
    }
    if not args.json:
        bits = f"{found['bits_per_byte']:.4f}" if size else "unknown"
        print(f"tokens {totals.tokens:,} in windows of {window}, {stride} apart")
        print(f"loss {totals.mean:.6f}, perplexity {totals.perplexity:.4f}, bits per byte {bits}")
    return found


def _windows(args: argparse.Namespace, positions: int) -> tuple[int, int]:
    """Tokens of a window, and between the beginnings of two."""
    window = min(_WINDOW, positions) if args.window is None else args.window
    return window, window // 2 if args.stride is None else args.stride


def _documents(
    data: str, tokenizer: Tokenizer, new_encoder: Callable[[], ChatEncoder]
) -> Iterator[Document]:
    """The documents of a file: a text, JSON lines, or token files by their prefix."""
    from megatron.dpp_train.generate.losses import Document, of_prefix

    path = Path(data)
    if Path(f"{data}.idx").is_file():
        check_index(data)
        yield from of_prefix(data)
    elif not path.is_file():
        near = nearest_path(path) or nearest_path(Path(f"{data}.idx"))
        raise DataError(f"--data {data}: neither a file nor a prefix of token files{near}")
    elif path.suffix in LINES:
        yield from _of_lines(path, tokenizer, new_encoder)
    else:
        text = read_text(path, "--data")
        yield Document([*tokenizer.begin, *encode(text, tokenizer, f"--data {data}")])


def _of_lines(
    path: Path, tokenizer: Tokenizer, new_encoder: Callable[[], ChatEncoder]
) -> Iterator[Document]:
    """Texts, and chats, whose answers alone count."""
    from megatron.dpp_train.generate.losses import Document

    encoder: ChatEncoder | None = None
    for number, line in json_lines(path, "--data"):
        try:
            if "text" in line:
                text = text_of(line, "text")
                whole = text if isinstance(text, str) else "".join(text)
                ids = encode(whole, tokenizer, f"{path}, line {number}")
                yield Document([*tokenizer.begin, *ids])
                continue
            encoder = encoder or new_encoder()
            samples, _ = encoder.encode(line)
            yield from (Document(sample.ids, sample.marks) for sample in samples)
        except BadLine as error:
            raise DataError(f"{path}, line {number}: {error}") from error


def text_bytes(document: Document, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the tokens that have a loss; special tokens and numbers have no text."""
    if isinstance(tokenizer, NullTokenizer):
        return 0
    special = frozenset(tokenizer.special_tokens().values())
    marks = document.marks or [1] * len(document.ids)
    rows = list(zip(document.ids, marks, strict=True))[1:]
    return sum(
        len(tokenizer.detokenize([i for i, _ in run if i not in special]).encode())
        for mark, run in itertools.groupby(rows, key=lambda row: row[1])
        if mark
    )


# --- tasks ---


def _folder_of(tokenizer: str) -> Path:
    path = Path(tokenizer)
    return path.parent if path.is_file() else path


def _tasks(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Scores of lm-evaluation-harness, which runs transformers on the model's export."""
    from megatron.dpp_train.generate.engine import default_device, default_dtype

    harness = importlib.import_module("lm_eval")
    with exported(source) as folder:
        settings = {
            "pretrained": str(folder),
            "dtype": args.dtype or default_dtype(args.device),
            **({"tokenizer": str(_folder_of(args.tokenizer))} if args.tokenizer else {}),
        }
        try:
            results = harness.simple_evaluate(
                model="hf",
                model_args=settings,
                tasks=args.tasks.split(","),
                device=default_device(args.device),
                batch_size=args.batch_size,
                limit=args.limit,
            )
        except (KeyError, ValueError, OSError) as error:
            raise DataError(f"--tasks {args.tasks}: {one_line(error, 300)}") from error
    if not args.json:
        print(importlib.import_module("lm_eval.utils").make_table(results))
    return {"tasks": results["results"]}


main = command("megatron-dpp evaluate", _parser, _run)
