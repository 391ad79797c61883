"""Files of sequences of unlike length: their names, and checks of their lengths before a run."""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.index_files import read_documents, read_lengths
from megatron.dpp_train.options.run_config import Settings

CHAT_SUFFIX, ANSWERS_SUFFIX = "_chat_document", "_answers_document"
"""Endings of the prefixes that ``preprocess --sft`` writes: token ids, and 1 for each token of an
answer."""


def answers_prefix(prefix: str) -> str:
    """The prefix of the marks of chats whose tokens are at ``prefix``."""
    return prefix.removesuffix(CHAT_SUFFIX) + ANSWERS_SUFFIX


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that ``preprocess --sft`` has not written: a DataError with the command."""
    if not prefix.endswith(CHAT_SUFFIX):
        raise DataError(
            f"--sft with data {prefix}: expected a prefix that ends in {CHAT_SUFFIX}; "
            "`megatron-dpp preprocess --sft` makes one from JSON lines, `megatron-dpp train --sft "
            "--data FILE.jsonl` runs it by itself"
        )


def keeps_answers(prefix: str, most: int) -> Any:
    """For each chat at ``prefix``, True unless it is longer than ``most`` tokens and none of its
    answers begins before: cut to ``most``, it has no loss. All files are whole."""
    import numpy

    lengths = read_lengths(prefix) - 1
    kept = numpy.ones(len(lengths), dtype=bool)
    marks, starts = read_documents(answers_prefix(prefix))
    for number in numpy.flatnonzero(lengths > most):
        start = int(starts[number]) + 1  # the first token is no label
        kept[number] = marks[start : start + most].any()
    return kept


def describe_overlong(prefix: str, args: Settings) -> str | None:
    """A warning that counts what is left out of documents above ``--seq-length``; None where none
    is so long. All files are whole."""
    lengths = read_lengths(prefix) - 1
    most, long = args.seq_length, lengths > args.seq_length
    if not long.any():
        return None
    text = f"{prefix}: {int(long.sum())} of {len(long)} documents exceed --seq-length {most}"
    if args.overlong == "skip":
        return f"{text} and are left out (--overlong skip)"
    lost, total = int((lengths[long] - most).sum()), int(lengths.clip(0).sum())
    if args.sft:
        marks, starts = read_documents(answers_prefix(prefix))
        ends = starts + lengths + 1
        lost = sum(int(marks[starts[n] + most + 1 : ends[n]].sum()) for n in long.nonzero()[0])
        total = int(marks.sum())
    text += f" and are cut (--overlong cut): {lost} of {total} tokens"
    text += " of answers are left out" if args.sft else " are left out"
    none = int((~keeps_answers(prefix, most)).sum()) if args.sft else 0
    return f"{text}, and {none} chats, which keep no answer" if none else text


def check_lengths(prefix: str, args: Settings) -> None:
    """Refuse documents that no microbatch holds; ``prefix``'s index is whole.

    Raises:
        ConfigError: a packed microbatch does not hold the longest document.
        DataError: documents exceed ``--seq-length`` with ``--overlong error``, or none is left.
    """
    lengths = read_lengths(prefix) - 1  # the last token is a label alone
    longest, most = int(lengths.max()), args.seq_length
    long = int((lengths > most).sum())
    if long and args.overlong == "error":
        raise DataError(
            f"{prefix}.idx: {long} of {len(lengths)} documents exceed --seq-length {most}, the "
            f"longest with {longest} tokens; raise it, or cut or skip them (--overlong cut, "
            "--overlong skip)"
        )
    usable = (lengths >= 1) & ((lengths <= most) if args.overlong == "skip" else True)
    if not usable.any():
        raise DataError(f"{prefix}.idx: no document has 2 to {most + 1} tokens; raise --seq-length")
    if args.sft and args.overlong == "cut":
        usable &= keeps_answers(prefix, most)
        if not usable.any():
            raise DataError(
                f"{prefix}.idx: no chat has an answer within --seq-length {most}, to which "
                f"--overlong cut cuts them; the longest has {longest} tokens. Raise --seq-length"
            )
    held = min(int(lengths[usable].max()), most)
    if args.packing != "none" and held > args.packing_budget:
        raise ConfigError(
            f"--packing-budget {args.packing_budget} is below the longest sequence of {prefix}, "
            f"{held} tokens; raise it, or lower --seq-length with --overlong cut or skip"
        )
