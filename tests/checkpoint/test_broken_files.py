"""Trackers, checksums and metadata of checkpoints that are lost, broken or hostile."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checksums, files


def _start(load: Path, pretrained: Path | None = None) -> Any:
    return argparse.Namespace(
        load=str(load),
        pretrained_checkpoint=pretrained and str(pretrained),
        ckpt_step=None,
        exit_on_missing_checkpoint=False,
    )


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "1\n2", "\u0663", "1" * 19])
def test_a_tracker_with_what_only_looks_like_a_number_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / files.TRACKER).write_text(text)
    with pytest.raises(DataError, match=r"iteration\.txt: (holds|has more than)"):
        files.find(str(tmp_path))


def test_a_lost_tracker_is_no_start_from_random_parameters(tmp_path: Path) -> None:
    """It names the iterations. The first save of a killed job is used, if it is whole."""
    for iteration in (3, 6):
        files.begin(tmp_path, iteration)
        files.commit(tmp_path, iteration)
    (tmp_path / files.TRACKER).unlink()
    with pytest.raises(DataError, match="missing, but there are iter_0000003, iter_0000006"):
        files.find_start(_start(tmp_path))
    with pytest.raises(DataError, match="missing, but there are"):
        files.find_start(_start(tmp_path, tmp_path))
    assert files.find(str(tmp_path), 3) == files.Found(tmp_path / "iter_0000003", 3)
    shutil.rmtree(tmp_path / "iter_0000003")
    assert files.find(str(tmp_path)) == files.Found(tmp_path / "iter_0000006", 6)
    (tmp_path / "iter_0000006" / checksums.NAME).unlink()
    with pytest.raises(DataError, match="missing, but there are iter_0000006"):
        files.find(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        None,
        argparse.Namespace(),
        argparse.Namespace(storage_data=[]),
        argparse.Namespace(storage_data={"a": 1}),
        argparse.Namespace(
            storage_data={"a": argparse.Namespace(relative_path=1, offset=0, length=1)}
        ),
        argparse.Namespace(
            storage_data={"a": argparse.Namespace(relative_path="../x", offset=0, length=1)}
        ),
        argparse.Namespace(
            storage_data={"a": argparse.Namespace(relative_path="x", offset="0", length=1)}
        ),
    ],
)
def test_metadata_of_a_wrong_shape_is_refused(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "read_pickle", lambda _: content)
    for name in ("metadata.json", "common.pt", ".metadata"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"\.metadata: "):
        files.check_whole(files.Found(tmp_path, 1), 1, 1)


@pytest.mark.parametrize(
    "text",
    [
        '{"crc32": [], "own": ""}',
        '{"crc32": {"a": 1}, "own": ""}',
        '{"crc32": {"../../etc/passwd": "0 0"}, "own": ""}',
        '{"crc32": {"/etc/passwd": "0 0"}, "own": ""}',
        "[" * 100_000,
        "[]",
    ],
)
def test_checksums_of_a_wrong_shape_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / checksums.NAME).write_text(text)
    with pytest.raises(DataError, match=r"checksums\.json: .*damaged"):
        checksums.read(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_00/model_optim_rng.pt", "common.pt"])
def test_a_file_of_tensors_that_is_cut_short_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save({"a": torch.ones(9)}, path)
    found = files.Found(tmp_path, 1)
    if name == "common.pt":
        (tmp_path / "metadata.json").touch()
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    files.check_whole(found, tensor=1, pipeline=1)
    os.truncate(path, 400)
    with pytest.raises(DataError, match=rf"{name}: 400 bytes, and its end is missing; copy it"):
        files.check_whole(found, tensor=1, pipeline=1)
