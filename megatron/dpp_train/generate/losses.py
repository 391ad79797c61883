"""Losses of documents that may be longer than the model's window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.dpp.errors import DataError, one_line, require
from megatron.dpp_train.data.sequence_files import CHAT_SUFFIX
from megatron.dpp_train.data.sequences import TokenFile
from megatron.dpp_train.generate.engine import Engine, Tokens


@dataclass(frozen=True)
class Document:
    """A document's tokens.

    Args:
        marks: 1 for each token whose loss counts; None counts all but the first.
    """

    ids: Sequence[int]
    marks: Sequence[int] | None = None


def of_prefix(prefix: str) -> Iterator[Document]:
    """The documents of token files. Of chats, as ``preprocess --sft`` writes them, answers count.

    Raises:
        DataError: a file is missing or broken.
    """
    try:
        found = TokenFile(prefix, chats=prefix.endswith(CHAT_SUFFIX), mmap=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{prefix}: {one_line(error)}") from error
    for number in range(len(found)):
        marks = None if found.answers is None else found.answers[number].tolist()
        yield Document(found.tokens[number].tolist(), marks)


@dataclass(frozen=True)
class _Piece:
    """A window of a document; the losses from ``first`` on count (0 is the second token's)."""

    ids: Tokens
    marks: Sequence[int]
    first: int


@dataclass
class Totals:
    """The sum of the losses, in nats, and the number of tokens that they are of."""

    loss: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean loss of a token, in nats."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean loss; infinite where that overflows."""
        return math.exp(self.mean) if self.mean < 700 else math.inf


def check_windows(window: int, stride: int, positions: int) -> None:
    """Raises ConfigError for windows that the model does not hold, or that do not overlap."""
    require(
        2 <= window <= positions,
        f"--window {window}: must be at least 2 and at most {positions}, the model's positions",
    )
    require(
        1 <= stride < window,
        f"--stride {stride}: must be at least 1 and below the window of {window} tokens",
    )


def windows(document: Document, window: int, stride: int) -> Iterator[_Piece]:
    """A document in windows that begin ``stride`` tokens apart; each token counts once, in the
    first window that holds it and a token before.
    """
    ids = document.ids
    marks = [1] * len(ids) if document.marks is None else document.marks
    done = 1
    for begin in range(0, max(len(ids) - 1, 0), stride):
        end = min(begin + window, len(ids))
        if any(marks[max(done, begin + 1) : end]):
            piece = ids[begin:end], marks[begin + 1 : end]
            yield _Piece(*piece, first=max(done, begin + 1) - begin - 1)
        done = end
        if end == len(ids):
            return


def total_loss(
    engine: Engine, documents: Iterable[Document], *, window: int, stride: int, batch_size: int
) -> Totals:
    """The losses of documents.

    Args:
        window: most tokens that the model reads together.
        stride: tokens between the beginnings of windows.
        batch_size: windows that are read at once, at least 1.

    Raises:
        DataError: a loss is not finite.
    """
    totals = Totals()
    pieces = (piece for each in documents for piece in windows(each, window, stride))
    for batch in _batches(pieces, window * batch_size):
        found = engine.losses([piece.ids for piece in batch])
        for piece, losses in zip(batch, found, strict=True):
            counted = torch.tensor(piece.marks[piece.first :], dtype=torch.bool)
            loss = float(losses[piece.first :][counted].double().sum())
            if not math.isfinite(loss):
                raise DataError(
                    f"the loss of a window of {len(piece.ids)} tokens is {loss}: the model's "
                    "parameters are damaged, or --dtype is too narrow for it (float32 is not)"
                )
            totals.loss += loss
            totals.tokens += int(counted.sum())
    return totals


def _batches(pieces: Iterable[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Consecutive pieces of at most ``most`` tokens together."""
    batch: list[_Piece] = []
    held = 0
    for piece in pieces:
        if batch and held + len(piece.ids) > most:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += len(piece.ids)
    if batch:
        yield batch
