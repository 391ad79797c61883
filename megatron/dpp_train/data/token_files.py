"""Writes Megatron's token files: ``.bin`` holds token ids, ``.idx`` where documents begin.

They are byte for byte those of megatron-core's ``IndexedDatasetBuilder``, which holds three Python
numbers for each document until the end.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.dpp.files.index_files import MAGIC

CHAT_SUFFIX, ANSWERS_SUFFIX = "_chat_document", "_answers_document"
"""Endings of the prefixes that ``preprocess --sft`` writes: token ids, and 1 for each token of an
answer."""
_LARGEST_SHORT = 65500
"""Vocabularies below this size have ids of two bytes, as in megatron-core."""


def token_type(vocab_size: int) -> np.dtype[np.integer]:
    """The type in which the ids of a vocabulary are stored."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_SHORT else np.int32)


class Documents(NamedTuple):
    """Documents one behind the other, each a series of sequences.

    Args:
        ids: token ids of all, one axis.
        lengths: tokens of each sequence (int32).
        counts: sequences of each document (int64).
    """

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(
        cls, ids: Sequence[int], lengths: Sequence[int], counts: Sequence[int], dtype: np.dtype
    ) -> Documents:
        """From Python's numbers; ids have the type ``dtype``."""
        return cls(
            np.asarray(ids, dtype), np.asarray(lengths, np.int32), np.asarray(counts, np.int64)
        )


class TokenFileWriter:
    """A pair of files. Memory: 4 bytes per sequence, 24 at the end, and 8 per document.

    Args:
        data: path of the ``.bin``, which is written at once.
        dtype: of the ids.
    """

    def __init__(self, data: Path, dtype: np.dtype) -> None:
        self._file, self._dtype = data.open("wb"), dtype
        self._lengths, self._begins = array("i"), array("q", [0])

    def add(self, documents: Documents) -> None:
        """Write documents behind those that are there."""
        self._file.write(documents.ids.tobytes())
        begins = len(self._lengths) + np.cumsum(documents.counts)
        self._lengths.frombytes(documents.lengths.tobytes())
        self._begins.frombytes(begins.tobytes())

    def finish(self, index: Path) -> None:
        """Close the data, and write the index to ``index``."""
        self.close()
        code = 8 if self._dtype.itemsize == 2 else 4  # megatron-core's, of uint16 and int32
        sizes = np.frombuffer(self._lengths, np.int32).astype(np.int64) * self._dtype.itemsize
        with index.open("wb") as file:
            file.write(MAGIC + struct.pack("<QB", 1, code))
            file.write(struct.pack("<QQ", len(self._lengths), len(self._begins)))
            file.write(self._lengths)
            file.write((np.cumsum(sizes) - sizes).tobytes())
            file.write(self._begins)

    def close(self) -> None:
        """Close the data; it may be called twice, and after an error, which comes once."""
        self._file.close()
