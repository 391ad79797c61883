"""``megatron-dpp preprocess``: turn text and chats into the token files that training reads.

The flags and the output are those of Megatron-LM's ``preprocess_data.py``, byte for byte. A bad
line is named with its file and number, sentences are split in the same run, and the output gets its
names only when all of it is written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import glob
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron.dpp.command_line import guarded, new_parser, progress_bar
from megatron.dpp.errors import ConfigError, DataError, plain, require
from megatron.dpp.files.locks import scratch_directory
from megatron.dpp_train.data import child
from megatron.dpp_train.data.chats import ANSWERS_KEY
from megatron.dpp_train.data.child import Child, Died
from megatron.dpp_train.data.encode import Begun, EncodedBatch, Encoder, keys_of
from megatron.dpp_train.data.rows import open_rows
from megatron.dpp_train.data.sentences import SPLITTERS
from megatron.dpp_train.data.token_files import Documents, TokenFileWriter
from megatron.dpp_train.data.tokenizer import PIECE_TYPES, TOKENIZER_TYPES

_BATCH_LINES = 256
_BATCH_BYTES = 1 << 20
_MOST_BAD_LINES_SHOWN = 20
_MOST_NOTES_SHOWN = 40
_MOST_DEATHS = 20
"""Lines that may end a worker in a run that leaves out bad lines."""
LINE_SECONDS = 10.0
"""Processor time that a line may take, beside what its length allows."""
_CHAT_TOKENIZERS = ("GPT2BPETokenizer", "HuggingFaceTokenizer", *PIECE_TYPES)


@dataclass(frozen=True)
class Batch:
    """Consecutive lines of one input file, or rows (``unit``); ``consumed`` are the bytes of the
    file that they took."""

    path: str
    unit: str
    first_number: int
    lines: list[bytes]
    consumed: int


@dataclass
class Totals:
    """Counts of the output."""

    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    answers: int = 0
    bad_lines: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, documents: dict[str, Documents]) -> None:
        """Count the documents of each key."""
        self.documents += len(next(iter(documents.values())).counts) if documents else 0
        for key, each in documents.items():
            if key == ANSWERS_KEY:
                self.answers += int(each.ids.sum())
                continue
            self.sentences += len(each.lengths)
            self.tokens += each.ids.size


def find_inputs(pattern: str) -> list[str]:
    """The files that ``--input`` names, in sorted order when it is a glob pattern."""
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    if not paths:
        raise DataError(f"--input {pattern}: no such file")
    if folder := next(filter(os.path.isdir, paths), None):
        raise DataError(f"--input {folder}: a folder; name the files in it (FOLDER/*.parquet)")
    return paths


def read_batches(paths: list[str]) -> Iterator[Batch]:
    """Cuts the files into batches of lines, in order."""
    for path in paths:
        rows = open_rows(Path(path))
        before, number, lines, size = 0, 1, [], 0
        for line, read in rows.lines:
            lines.append(line)
            size += len(line)
            if len(lines) == _BATCH_LINES or size >= _BATCH_BYTES:
                yield Batch(path, rows.unit, number, lines, read - before)
                before, number, lines, size = read, number + len(lines), [], 0
        if lines:
            yield Batch(path, rows.unit, number, lines, os.path.getsize(path) - before)


class Work:
    """The encoding of batches in children.

    Raises:
        DppError: the settings cannot be used.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._workers, self._deaths = args.workers, 0
        self._begin = functools.partial(Encoder, args, LINE_SECONDS)
        modules = ["megatron.dpp_train.data.encode"]
        if args.tokenizer_type == "HuggingFaceTokenizer":
            modules.append("transformers.models.auto.tokenization_auto")
        child.prepare(*modules)
        what = f"{args.tokenizer_type} or the chat template"
        try:
            with contextlib.closing(Child(self._begin)) as first:
                first.send(None)
                self.begun: Begun = first.receive()
        except Died as died:
            raise DataError(f"{what} cannot be read: {died}") from died

    def encoded(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, EncodedBatch]]:
        """The batches in their order, encoded; lines that end a worker are bad ones."""
        requests = ((batch, batch.lines) for batch in batches)
        for batch, found in child.in_order(self._workers, self._begin, requests):
            if isinstance(found, Died):
                yield from self._line_by_line(batch)
            else:
                yield batch, found

    def _line_by_line(self, batch: Batch) -> Iterator[tuple[Batch, EncodedBatch]]:
        """The lines of a batch that has ended its worker, each as a batch."""
        last = len(batch.lines) - 1
        lines = (
            replace(
                batch,
                first_number=batch.first_number + number,
                lines=[line],
                consumed=batch.consumed if number == last else 0,
            )
            for number, line in enumerate(batch.lines)
        )
        for one, found in child.in_order(1, self._begin, ((each, each.lines) for each in lines)):
            yield one, self._as_bad(one, found) if isinstance(found, Died) else found

    def _as_bad(self, batch: Batch, died: Died) -> EncodedBatch:
        """A batch of one bad line, at which a worker has died."""
        where = f"{batch.path}, {batch.unit} {batch.first_number}"
        if died.code == -signal.SIGKILL:
            raise DataError(
                f"{where}: its process was killed (by the system, for want of memory?): try fewer "
                f"than --workers {self._workers}"
            )
        self._deaths += 1
        if self._deaths > _MOST_DEATHS:
            raise DataError(
                f"{where}: {died}, as with {_MOST_DEATHS} lines before: tokenizer or template "
                "cannot be used"
            )
        return EncodedBatch({}, Counter(), [(0, str(died))])


class Writer:
    """The ``.bin`` and ``.idx`` files of all keys, under temporary names until :meth:`publish`.

    The temporary folder lies beside the output (renaming stays within one file system) and goes
    away with ``stack``, whatever happened.
    """

    def __init__(
        self, prefix: str, keys: tuple[str, ...], level: str, dtype: np.dtype, stack: ExitStack
    ) -> None:
        self._targets = {key: Path(f"{prefix}_{key}_{level}") for key in keys}
        first = self._targets[keys[0]]
        first.parent.mkdir(parents=True, exist_ok=True)
        scratch = scratch_directory(first.parent, f".{first.name}.partial-")
        self._folder = stack.enter_context(scratch)
        self._files: dict[str, TokenFileWriter] = {}
        for key, target in self._targets.items():
            self._files[key] = TokenFileWriter(self._partial(target, ".bin"), dtype)
            stack.callback(self._files[key].close)

    def add(self, documents: dict[str, Documents]) -> None:
        for key, each in documents.items():
            self._files[key].add(each)

    def publish(self) -> list[Path]:
        """Gives all files their names and returns these; each ``.idx`` comes after its ``.bin``.

        Old indices go first: a crash in between leaves files without an index, which nothing
        takes for a data set, and never an old index beside new data.
        """
        for key, target in self._targets.items():
            self._files[key].finish(self._partial(target, ".idx"))
        for target in self._targets.values():
            Path(f"{target}.idx").unlink(missing_ok=True)
        published = []
        for target in self._targets.values():
            for suffix in (".bin", ".idx"):
                os.replace(self._partial(target, suffix), f"{target}{suffix}")
                published.append(Path(f"{target}{suffix}"))
        return published

    def _partial(self, target: Path, suffix: str) -> Path:
        return self._folder / f"{target.name}{suffix}"


def preprocess(args: argparse.Namespace) -> tuple[Totals, list[Path]]:
    """Encodes all documents of ``--input`` into ``PREFIX_KEY_{document,sentence}.{bin,idx}``.

    Returns:
        What was written, and the files.

    Raises:
        DataError: a bad line without ``--skip-bad-lines``, no document at all, or a broken input.
    """
    paths = find_inputs(args.input)
    level = "sentence" if args.split_sentences else "document"
    work = Work(args)
    for note in work.begun.notes:
        print(f"note: {note}", file=sys.stderr)
    totals = Totals()
    bar = progress_bar(
        sum(map(os.path.getsize, paths)),
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        disable=False,
        leave=True,
    )
    with bar, ExitStack() as stack:
        writer = Writer(args.output_prefix, keys_of(args), level, work.begun.dtype, stack)
        for batch, encoded in work.encoded(read_batches(paths)):
            _take_batch(batch, encoded, writer, totals, skip_bad_lines=args.skip_bad_lines)
            bar.set_postfix_str(f"{totals.documents} documents", refresh=False)
            bar.update(batch.consumed)
        if not totals.sentences:
            raise DataError(f"{', '.join(paths)}: {totals.documents} documents and not one token")
        return totals, writer.publish()


def _take_batch(
    batch: Batch, encoded: EncodedBatch, writer: Writer, totals: Totals, *, skip_bad_lines: bool
) -> None:
    for number, reason in encoded.bad_lines:
        message = f"{batch.path}, {batch.unit} {batch.first_number + number}: {reason}"
        if not skip_bad_lines:
            raise DataError(f"{message} (--skip-bad-lines leaves such lines out)")
        totals.bad_lines.append(message)
    totals.notes.update(encoded.notes)
    writer.add(encoded.documents)
    totals.add(encoded.documents)


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Turn JSON lines and tables into the token files that training reads."
    parser = new_parser(prog, text, "--input FILES --output-prefix PREFIX [options]")
    parser.allow_abbrev = False
    data = parser.add_argument_group("input and output").add_argument
    data(
        "--input",
        required=True,
        metavar="FILES",
        help="JSON lines or array, .gz too, Parquet; glob patterns",
    )
    data("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to encode (text)")
    data("--output-prefix", required=True, metavar="PREFIX", help="output path without a suffix")
    data("--skip-bad-lines", action="store_true", help="leave bad lines out")
    tokens = parser.add_argument_group("tokenizer").add_argument
    tokens("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, metavar="TYPE",
           help=", ".join(TOKENIZER_TYPES))  # fmt: skip
    tokens("--vocab-file", metavar="FILE")
    tokens("--merge-file", metavar="FILE")
    tokens("--tokenizer-model", metavar="FILE", help="its file, or the directory")
    tokens("--vocab-size", type=int, metavar="N", help="for NullTokenizer")
    tokens("--append-eod", action="store_true", help="end documents with a token")
    chats = parser.add_argument_group("chats").add_argument
    chats("--sft", action="store_true", help="lines hold chats")
    chats("--sft-tokenizer-prompt-format", default="auto", metavar="NAME",
          help="auto, default (tokenizer's), plain, or a file")  # fmt: skip
    sentences = parser.add_argument_group("sentences (BERT)").add_argument
    sentences("--split-sentences", action="store_true")
    sentences("--sentence-splitter", choices=SPLITTERS, default="nltk", metavar="NAME",
              help="nltk (Punkt model), or rules (English)")  # fmt: skip
    sentences("--keep-newlines", action="store_true")
    sentences("--lang", default="english", help="language of the Punkt model")
    runtime = parser.add_argument_group("runtime").add_argument
    runtime("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    for flag in ("--keep-sequential-samples", "--legacy-tokenizer"):
        runtime(flag, action="store_true", help="always on")
    for flag in ("--partitions", "--log-interval"):
        runtime(flag, type=int, metavar="N", help=argparse.SUPPRESS)
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    require(1 <= args.workers <= 4096, f"--workers {args.workers}: must be 1 to 4096")
    require(args.output_prefix, "--output-prefix is empty: name the files to write")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)}: a key is named twice")
    if args.sft and (args.split_sentences or args.tokenizer_type not in _CHAT_TOKENIZERS):
        kinds = " or ".join(_CHAT_TOKENIZERS)
        raise ConfigError(f"--sft needs --tokenizer-type {kinds} and whole documents")
    if args.tokenizer_type.startswith("Bert") and not args.split_sentences:
        print("warning: BERT's data needs --split-sentences", file=sys.stderr)


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp preprocess") -> int:
    """Run the command; returns 1 after an error, 2 for settings that cannot work."""
    args = _parser(prog).parse_args(argv)
    return guarded(prog, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    _check_arguments(args)
    totals, files = preprocess(args)
    for note, count in totals.notes.most_common(_MOST_NOTES_SHOWN):
        lines = "line" if count == 1 else "lines"
        print(plain(f"note: {count} {lines}: {note}"), file=sys.stderr)
    for message in totals.bad_lines[:_MOST_BAD_LINES_SHOWN]:
        print(plain(f"skipped: {message}"), file=sys.stderr)
    tokens = f"{totals.tokens} tokens"
    tokens += f" ({totals.answers} in answers)" if args.sft else ""
    print(
        f"{totals.documents} documents, {totals.sentences} sequences, {tokens} in "
        f"{time.monotonic() - start:.1f} s, {len(totals.bad_lines)} bad lines skipped: "
        + ", ".join(str(path) for path in files)
    )
    return 0
