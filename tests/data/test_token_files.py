"""The token files that preprocessing writes are those of megatron-core's builder, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron.dpp_train.data.token_files import Documents, TokenFileWriter, token_type


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_files_are_those_of_megatron_core(vocab_size: int, tmp_path: Path) -> None:
    """Documents of several sequences, of one, and empty ones; in several batches."""
    draw, dtype = random.Random(vocab_size), token_type(vocab_size)
    assert dtype == DType.optimal_dtype(vocab_size)
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    ours = TokenFileWriter(tmp_path / "ours.bin", dtype)
    for _ in range(3):
        sizes = [[draw.randrange(1, 9) for _ in range(draw.randrange(4))] for _ in range(20)]
        texts = [[draw.randrange(vocab_size) for _ in range(sum(each))] for each in sizes]
        for ids, lengths in zip(texts, sizes, strict=True):
            theirs.add_document(np.array(ids), lengths)
        ours.add(
            Documents.of(
                [i for ids in texts for i in ids],
                [n for each in sizes for n in each],
                [len(each) for each in sizes],
                dtype,
            )
        )
    theirs.finalize(str(tmp_path / "theirs.idx"))
    ours.finish(tmp_path / "ours.idx")
    for end in ("bin", "idx"):
        written = (tmp_path / f"ours.{end}").read_bytes()
        assert written == (tmp_path / f"theirs.{end}").read_bytes()


def test_more_sequences_than_are_indexed_at_once(tmp_path: Path) -> None:
    count = (1 << 20) + 3
    file, ids = TokenFileWriter(tmp_path / "x.bin", token_type(100)), np.arange(count) % 100
    one = np.ones(count, np.int64)
    file.add(Documents(ids.astype(np.uint16), one.astype(np.int32), one))
    file.finish(tmp_path / "x.idx")
    found = IndexedDataset(str(tmp_path / "x"))
    assert [int(found[i][0]) for i in range(count - 5, count)] == ids[-5:].tolist()
