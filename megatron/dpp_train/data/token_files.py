"""Writes Megatron's token files: ``.bin`` holds token ids, ``.idx`` where documents begin.

They are byte for byte those of megatron-core's ``IndexedDatasetBuilder``, which holds three Python
numbers for each document until the end.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from megatron.dpp.files.index_files import MAGIC, TOKEN_TYPES
from megatron.dpp.files.safe_files import open_to_write

_LARGEST_SHORT = 65500
"""Vocabularies below this size have ids of two bytes, as in megatron-core."""
_BLOCK = 1 << 20


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
    """A pair of files. Memory: 4 bytes per sequence and 8 per document.

    Args:
        data: path of the ``.bin``, which is written at once.
        dtype: of the stored ids.
    """

    def __init__(self, data: Path, dtype: np.dtype) -> None:
        self._path = data
        self._file: IO[bytes] = open_to_write(data)
        self._dtype = dtype
        self._lengths, self._begins = array("i"), array("q", [0])

    def add(self, documents: Documents) -> None:
        """Write documents behind those that are there."""
        with _naming(self._path):
            self._file.write(documents.ids.astype(self._dtype, copy=False).tobytes())
        begins = len(self._lengths) + np.cumsum(documents.counts)
        self._lengths.frombytes(documents.lengths.astype(np.int32, copy=False).tobytes())
        self._begins.frombytes(begins.astype(np.int64, copy=False).tobytes())

    def finish(self, index: Path) -> None:
        """Close the data, and write the index to ``index``."""
        with _naming(self._path):
            self.close()
        code = {name: code for code, name in TOKEN_TYPES.items()}[self._dtype.str[1:]]
        place = 0
        with _naming(index), open_to_write(index) as file:
            file.write(MAGIC + struct.pack("<QB", 1, code))
            file.write(struct.pack("<QQ", len(self._lengths), len(self._begins)))
            file.write(self._lengths)
            for first in range(0, len(self._lengths), _BLOCK):
                block = np.frombuffer(self._lengths[first : first + _BLOCK], np.int32)
                ends = place + np.cumsum(block.astype(np.int64) * self._dtype.itemsize)
                file.write((ends - block.astype(np.int64) * self._dtype.itemsize).tobytes())
                place = int(ends[-1])
            file.write(self._begins)

    def close(self) -> None:
        """Close the data; it may be called twice, and after an error, which comes once."""
        self._file.close()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives an error of a write this file's name, which the kernel does not tell."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
