"""The cache of megatron-core's sample indices follows no link of another user."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.index_cache import drop_stale, own_files_only
from megatron.dpp_train.data.token_files import Documents, TokenFileWriter
from tests.soak import write_tokens


def build(folder: Path, **more: Any) -> Any:
    """The data set of the corpus ``tokens``, with samples of 8 tokens; ``more`` of its settings."""
    tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=100, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=([str(folder / "tokens")], None), split="1,0,0",
        path_to_cache=str(folder / "cache"), tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, **more,
    )  # fmt: skip
    drop_stale(GPTDataset, config)
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
    whole = [int(each) for each in build(tmp_path)[3]["tokens"]]
    (file,) = (tmp_path / "cache").glob(f"*train-{suffix}")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    file.unlink()
    file.symlink_to(precious) if trap == "link" else os.mkfifo(file)
    (other,) = (tmp_path / "cache").glob("*train-shuffle_index.npy")
    other.unlink()  # else a link to a file is taken for an index
    with pytest.raises(OSError, match="is a link" if trap == "link" else "is a named pipe"):
        build(tmp_path)
    assert precious.read_text() == "mine"
    file.unlink()
    assert [int(each) for each in build(tmp_path)[3]["tokens"]] == whole


def write_corpus(folder: Path, lengths: Iterable[int]) -> set[int]:
    """A corpus in the place of an earlier one, whose documents repeat one token each. Returns the
    tokens."""
    documents = [[token] * length for token, length in enumerate(lengths, 1)]
    new, kind = folder / "new.bin", np.dtype(np.uint16)
    file = TokenFileWriter(new, kind)
    ids = [token for document in documents for token in document]
    lengths = [len(document) for document in documents]
    file.add(Documents.of(ids, lengths, [1] * len(lengths), kind))
    file.finish(new.with_suffix(".idx"))
    for suffix in (".bin", ".idx"):
        new.with_suffix(suffix).replace(folder / f"tokens{suffix}")
    return set(ids)


def _tokens(dataset: Any) -> set[int]:
    return {int(token) for number in range(len(dataset)) for token in dataset[number]["tokens"]}


def _let_the_clock_pass(folder: Path) -> None:
    """Until the corpus counts as younger than the cache, by a clock of milliseconds."""
    cached = max(each.stat().st_ctime_ns for each in (folder / "cache").iterdir())
    while (folder / "tokens.idx").stat().st_ctime_ns <= cached:
        (folder / "tokens.idx").chmod(0o644)


def test_indices_of_an_earlier_corpus_are_built_anew(tmp_path: Path) -> None:
    """They cut the new one's documents where the earlier one's had ended."""
    first = write_corpus(tmp_path, [13] * 12)
    assert _tokens(build(tmp_path)) == first
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert _tokens(build(tmp_path)) == first
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    second = write_corpus(tmp_path, [3] * 60)
    os.utime(tmp_path / "tokens.idx", (1, 1))  # made long ago, and moved here
    _let_the_clock_pass(tmp_path)
    assert len(_tokens(build(tmp_path))) > 50 <= len(second)


def test_indices_of_an_earlier_corpus_that_cannot_be_removed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, [13] * 12)
    build(tmp_path)
    write_corpus(tmp_path, [3] * 60)
    _let_the_clock_pass(tmp_path)

    def unlink(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(DataError, match=r"older than .*tokens\.idx, and cannot be removed \(Read-"):
        build(tmp_path)


def test_a_run_keeps_the_indices_that_it_has_mapped(tmp_path: Path) -> None:
    """Another one that began at the same time wrote its own over them, and zeros were read."""
    write_corpus(tmp_path, [13] * 12)
    build(tmp_path)
    running = build(tmp_path)
    before = _tokens(running)
    write_corpus(tmp_path, [3] * 60)
    _let_the_clock_pass(tmp_path)
    build(tmp_path)
    assert _tokens(running) == before
    assert not list((tmp_path / "cache").glob("*.new"))
