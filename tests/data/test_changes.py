"""A corpus that is written while a run reads it is named; one that is replaced stays as it was."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.workers import Loader
from tests.data.test_index_cache import build, write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The tokens of a corpus."""
    write_corpus(tmp_path, [13] * 12)
    return tmp_path / "tokens.bin"


def batches(corpus: Path, num_workers: int, *, mmap_bin_files: bool = True) -> Any:
    args: Any = argparse.Namespace(
        num_workers=num_workers, device="cpu", seed=1, distributed_timeout_minutes=1.0,
        exit_signal_handler=False, mmap_bin_files=mmap_bin_files,
    )  # fmt: skip
    dataset = build(corpus.parent, mmap_bin_files=mmap_bin_files)
    return iter(Loader(args, dataset, batch_size=1))


def let_a_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 100)


def write_over(path: Path, content: bytes) -> None:
    """In place, with a later time whatever the clock's step."""
    path.write_bytes(content)
    os.utime(path, ns=(0, time.time_ns() + 10**9))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_tokens_that_change_in_place_end_the_run(
    corpus: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on with other tokens than it began with."""
    samples, path = batches(corpus, 0), corpus.with_suffix(suffix)
    next(samples)
    write_over(path, path.read_bytes())
    let_a_second_pass(monkeypatch)
    with pytest.raises(DataError, match=rf"tokens\{suffix}: written while this run reads it"):
        next(samples)


# PyTorch's iterator may meet the ended worker once more where it is deleted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_corpus_that_is_cut_short_is_named_and_not_the_shared_memory(corpus: Path) -> None:
    """The worker ends by SIGBUS; the error spoke of a full /dev/shm."""
    samples = batches(corpus, 1)
    next(samples)
    os.truncate(corpus, 0)
    with pytest.raises(DataError, match=r"tokens\.bin: written .*\(it has 0 bytes, and had 312 "):
        for _ in samples:
            pass


def test_a_corpus_that_another_one_replaces_stays_as_it_was(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [sample["tokens"].tolist() for sample in batches(corpus, 0)]
    samples = batches(corpus, 0)
    found = [next(samples)["tokens"].tolist()]
    write_corpus(corpus.parent, [3] * 60)
    let_a_second_pass(monkeypatch)
    assert found + [sample["tokens"].tolist() for sample in samples] == whole


def test_a_corpus_that_is_not_mapped_may_not_be_replaced(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = batches(corpus, 0, mmap_bin_files=False)
    next(samples)
    write_corpus(corpus.parent, [12] * 13)
    with pytest.raises(DataError, match=r"tokens\.(bin|idx): written while"):
        let_a_second_pass(monkeypatch)
        next(samples)
