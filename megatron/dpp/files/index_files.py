"""Reads the index of Megatron's token files: their documents and the lengths of these."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO, Any

from megatron.dpp.errors import DataError
from megatron.dpp.files.safe_files import open_to_read

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = 34
"""Bytes of an index before its lengths."""

TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes per token of megatron-core's dtype codes."""
_MOST_LOOKED_AT = 1 << 24


def check_index(prefix: str) -> tuple[int, int]:
    """Compare the sizes of ``prefix.idx`` and ``prefix.bin`` with what the index's header says, and
    the parts of an index of up to 2**24 sequences with each other.

    Returns:
        The number of its sequences and of its documents.

    Raises:
        DataError: a file is missing, is no index, or is shorter than it should be.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise DataError(
                f"{path}: no such file (data prefixes are given without .bin and .idx; "
                "megatron-dpp preprocess makes both)"
            )
    with open_to_read(index) as file:
        sequences, documents, token_bytes = _header(file, index)
        file.seek(_HEADER + (sequences - 1) * 4)
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER + sequences * 4 + (sequences - 1) * 8)
        (pointer,) = struct.unpack("<q", file.read(8))
        if sequences <= _MOST_LOOKED_AT and not _fits(file, sequences, documents, token_bytes):
            raise DataError(f"{index}: damaged: its lengths and places contradict each other")
    needed = pointer + length * token_bytes
    with open_to_read(data) as file:
        actual = os.fstat(file.fileno()).st_size
    if actual != needed:
        raise DataError(
            f"{data}: {actual} bytes, but {index.name} says {needed}; copy both again, or make "
            "them with megatron-dpp preprocess"
        )
    return sequences, documents - 1  # it holds where each begins, and the end


def _header(file: IO[bytes], index: Path) -> tuple[int, int, int]:
    """Sequences, entries of documents and bytes of a token, where the file has their size."""
    header = file.read(_HEADER)
    if len(header) < _HEADER or header[:9] != MAGIC:
        raise DataError(f"{index}: not a Megatron index (bad header)")
    version, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in TOKEN_BYTES:
        raise DataError(
            f"{index}: version {version}, dtype code {code}: expected version 1 and a code of 1 "
            "to 8"
        )
    expected = _HEADER + sequences * (4 + 8) + documents * 8
    actual = os.fstat(file.fileno()).st_size
    if actual not in (expected, expected + sequences):  # multimodal indices have modes
        raise DataError(
            f"{index}: {actual} bytes, but its header says {expected}: cut short? Copy it again"
        )
    if not sequences:
        raise DataError(f"{index}: holds no sequence")
    return sequences, documents, TOKEN_BYTES[code]


def _fits(file: IO[bytes], sequences: int, documents: int, token_bytes: int) -> bool:
    """True if the sequences lie one behind the other, and the documents begin in their order."""
    import numpy

    file.seek(_HEADER)
    lengths = numpy.frombuffer(file.read(sequences * 4), numpy.int32).astype(numpy.int64)
    places = numpy.frombuffer(file.read(sequences * 8), numpy.int64)
    begins = numpy.frombuffer(file.read(documents * 8), numpy.int64)
    if (lengths < 0).any() or not documents or (begins[0], begins[-1]) != (0, sequences):
        return False
    ends = numpy.cumsum(lengths * token_bytes)
    return bool((places == ends - lengths * token_bytes).all() and (numpy.diff(begins) >= 0).all())


def read_lengths(prefix: str) -> Any:
    """Tokens of each document in ``prefix.idx``, which is whole."""
    import numpy

    with open_to_read(prefix + ".idx") as index:
        (count,) = struct.unpack("<Q", index.read(_HEADER)[18:26])
        return numpy.fromfile(index, dtype=numpy.int32, count=count)
