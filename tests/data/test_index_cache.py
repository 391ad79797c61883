"""The cache of megatron-core's sample indices follows no link of another user."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron.dpp_train.data.index_cache import own_files_only
from tests.soak import write_tokens


def _build(folder: Path) -> Any:
    tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=100, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=([str(folder / "tokens")], None), split="1,0,0",
        path_to_cache=str(folder / "cache"), tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    with own_files_only():
        return BlendedMegatronDatasetBuilder(GPTDataset, [20, 0, 0], lambda: True, config).build()[
            0
        ]


@pytest.mark.parametrize("suffix", ["description.txt", "document_index.npy", "sample_index.npy"])
@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_a_trap_in_the_cache_is_refused_and_nothing_is_written(
    tmp_path: Path, suffix: str, trap: str
) -> None:
    """Whoever may write beside a corpus had any file of its reader overwritten."""
    write_tokens(tmp_path / "tokens")
    whole = [int(each) for each in _build(tmp_path)[3]["tokens"]]
    (file,) = (tmp_path / "cache").glob(f"*train-{suffix}")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    file.unlink()
    file.symlink_to(precious) if trap == "link" else os.mkfifo(file)
    (other,) = (tmp_path / "cache").glob("*train-shuffle_index.npy")
    other.unlink()  # else a link to a file is taken for an index
    with pytest.raises(OSError, match="is a link" if trap == "link" else "is a named pipe"):
        _build(tmp_path)
    assert precious.read_text() == "mine"
    file.unlink()
    assert [int(each) for each in _build(tmp_path)[3]["tokens"]] == whole
