"""Files of documents: the names of chats' files, and checks of lengths. Needs NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.dpp.errors import DataError
from megatron.dpp.files.index_files import check_index, read_documents, read_lengths

CHAT_SUFFIX, ANSWERS_SUFFIX = "_chat_document", "_answers_document"
"""Endings of the prefixes that ``preprocess --sft`` writes: token ids, and 1 for each token of an
answer."""


def answers_prefix(prefix: str) -> str | None:
    """The prefix of the marks of chats whose tokens are at ``prefix``; None for texts."""
    if not prefix.endswith(CHAT_SUFFIX):
        return None
    return prefix.removesuffix(CHAT_SUFFIX) + ANSWERS_SUFFIX


def used_documents(prefix: str, most: int, overlong: str) -> Any:
    """For each document at ``prefix``, True if it is used: it has a label, it is not skipped, and a
    chat keeps an answer in its first ``most`` tokens. All files are whole."""
    lengths = read_lengths(prefix) - 1  # the last token is a label alone
    used = lengths >= 1
    if overlong == "skip":
        used &= lengths <= most
    marks = answers_prefix(prefix)
    if marks is not None:
        answers, starts = read_documents(marks)
        for number in np.flatnonzero(used & (lengths > most)):
            start = int(starts[number]) + 1  # the first token is no label
            used[number] = answers[start : start + most].any()
    return used


def check_documents(prefix: str, most: int, overlong: str) -> str | None:
    """Check the files of ``prefix`` for a run with ``--seq-length`` ``most``.

    Returns:
        A line that counts what is cut or left out; None where nothing is.

    Raises:
        DataError: a file is missing or broken, marks and tokens differ in their lengths, documents
            are too long with ``--overlong error``, or none is left.
    """
    check_index(prefix)
    lengths = read_lengths(prefix) - 1
    marks = answers_prefix(prefix)
    if marks is not None:
        check_index(marks)
        if not np.array_equal(lengths, read_lengths(marks) - 1):
            raise DataError(f"{marks}: marks other documents than {prefix}; make both again")
    long = lengths > most
    if long.any() and overlong == "error":
        raise DataError(
            f"{prefix}.idx: {int(long.sum())} of {len(lengths)} documents exceed --seq-length "
            f"{most}, the longest with {int(lengths.max())} tokens; raise it, or cut or skip them "
            "(--overlong cut, --overlong skip)"
        )
    used = used_documents(prefix, most, overlong)
    if not used.any():
        raise DataError(
            f"{prefix}.idx: no document has 2 to {most + 1} tokens"
            + (" with a part of an answer" if marks else "")
            + f", the longest {int(lengths.max()) + 1}; raise --seq-length"
        )
    if not long.any():
        return None
    text = f"{prefix}: {int(long.sum())} of {len(lengths)} documents exceed --seq-length {most}: "
    cut = int((used & long).sum())
    return f"{text}{cut} are cut, {int(long.sum()) - cut} left out (--overlong {overlong})"
