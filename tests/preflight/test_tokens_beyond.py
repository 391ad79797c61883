"""A tokenizer may have more tokens than the model, as long as no text holds one."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.preflight import check as preflight
from tests.hf import tiny

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --eval-iters 0 "
    "--transformer-impl local --device cpu --tokenizer-type HuggingFaceTokenizer --split 1,0,0"
)


def test_a_token_beyond_the_model_is_named_and_no_text_may_hold_it(tmp_path: Path) -> None:
    """The start was refused with --padded-vocab-size, which nobody had given."""
    folder = tmp_path / "tokenizer"
    tiny.add_tokenizer(folder, ["Who is Ada?"], 270)
    tokenizer = preflight.tokenizer_for(preflight.arguments.parse_args(words(folder, tmp_path)))
    size = tokenizer.vocab_size
    last = tokenizer.inv_vocab[size - 1]
    for token, rows in ((size - 2, size - 1), (size - 1, size)):
        write(tmp_path / "data", token)
        args, found = preflight.check("gpt", words(folder, tmp_path, rows), 1)
        line = preflight.tokens_beyond(args, found)
        if rows == size:
            assert line is None
        else:
            assert line is not None and f"{folder}" in line and repr(last) in line
            assert f"has {size} tokens, the model (--padded-vocab-size) {rows}" in line
    with pytest.raises(DataError, match=f"token id {size - 1} is outside of .* {size - 1}; give"):
        preflight.check("gpt", words(folder, tmp_path, size - 1), 1)
    mock = [*words(folder, tmp_path, size - 1)[:-2], "--mock-data"]
    with pytest.raises(ConfigError, match="--mock-data draws all tokens: the tokenizer"):
        preflight.check("gpt", mock, 1)


def words(folder: Path, data: Path, rows: int = 0) -> list[str]:
    given = f"{RUN} --tokenizer-model {folder}"
    given += f" --padded-vocab-size {rows}" if rows else ""
    return f"{given} --data-path {data / 'data'}".split()


def write(prefix: Path, token: int) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    builder.add_document(torch.full((20,), token), [20])
    builder.finalize(f"{prefix}.idx")
