"""Samplers, data files and checkpoint directories: what resumes, and what is refused."""

from __future__ import annotations

import argparse
import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.cli import checkpoint_files as files
from megatron.dpp.cli.arguments import parse_args
from megatron.dpp.cli.files import check_files, check_index, check_split
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.train.data import CyclicSampler, SequentialSampler


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(1, 60))
def test_sequential_replicas_share_every_batch_once(
    size: int, replicas: int, consumed_batches: int, extra: int
) -> None:
    consumed = consumed_batches * size * replicas
    total = consumed + extra
    parts = [list(SequentialSampler(total, consumed, size, r, replicas)) for r in range(replicas)]
    covered = [i for batch in zip(*parts, strict=True) for part in batch for i in part]
    whole = extra // (size * replicas) * size * replicas
    assert covered == list(range(consumed, consumed + whole))


@given(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(4, 9))
def test_cyclic_resumes_where_it_stopped(
    sharded: bool, size: int, replicas: int, num_batches: int
) -> None:
    total = size * replicas * num_batches
    for replica in range(replicas):
        whole = list(CyclicSampler(total, 0, size, replica, replicas, sharded=sharded))
        assert len(whole) == num_batches
        rest = list(
            CyclicSampler(total, size * replicas * 2, size, replica, replicas, sharded=sharded)
        )
        assert rest == whole[2:]
        again = list(CyclicSampler(total, size * replicas * num_batches, size, replica, replicas))
        assert len(again) == num_batches


def test_no_samples_left_is_said() -> None:
    with pytest.raises(DataError, match="8 of 8 are consumed"):
        SequentialSampler(8, 8, 1, 0, 1)


def _write_index(prefix: Path, lengths: list[int]) -> None:
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    body = struct.pack(f"<{len(lengths)}i", *lengths)
    body += struct.pack(f"<{len(lengths)}q", *pointers)
    body += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    prefix.with_suffix(".idx").write_bytes(header + body)
    prefix.with_suffix(".bin").write_bytes(b"\0" * 2 * sum(lengths))


def test_a_broken_index_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    with pytest.raises(DataError, match=r"data\.idx: no such file"):
        check_index(str(prefix))
    _write_index(prefix, [3, 4])
    check_index(str(prefix))
    whole = prefix.with_suffix(".idx").read_bytes()
    prefix.with_suffix(".bin").write_bytes(b"\0" * 13)
    with pytest.raises(DataError, match=r"data\.bin: 13 bytes, but data\.idx says 14"):
        check_index(str(prefix))
    prefix.with_suffix(".idx").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="cut short"):
        check_index(str(prefix))
    prefix.with_suffix(".idx").write_bytes(b"no index" + whole)
    with pytest.raises(DataError, match="bad header"):
        check_index(str(prefix))


def test_berts_prefixes_need_weights(tmp_path: Path) -> None:
    """megatron-core cannot make as many samples of masked words as there are."""
    prefix = str(tmp_path / "data")
    _write_index(Path(prefix), [3, 4])
    flags = f"--split 1 --data-path {prefix} {prefix}".split()
    check_files(parse_args(flags), "gpt")
    check_files(parse_args(["--split", "1", "--data-path", "1", prefix, "1", prefix]), "bert")
    with pytest.raises(ConfigError, match="give every prefix a weight"):
        check_files(parse_args(flags), "bert")


def test_a_split_that_leaves_a_set_empty_is_refused() -> None:
    for split in ("949,50,1", "100,0,0", "1", ".9 / .1"):
        check_split("data", split, 1000)
    check_split("data", "100,0,0", 1)
    with pytest.raises(DataError, match="949,50,1 leaves none of its 400 documents for test"):
        check_split("data", "949,50,1", 400)
    for split in ("1,1,1,1", "all", "0,0"):
        with pytest.raises(ConfigError, match=f"--split {split}: expected shares"):
            check_split("data", split, 1000)


def _save(root: Path, iteration: int) -> None:
    (files.begin(root, iteration) / "state").write_text(str(iteration))
    files.commit(root, iteration)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert files.find(root) is None
    _save(tmp_path, 3)
    _save(tmp_path, 6)
    _save(tmp_path, 6)  # replacing one's own is fine
    found = files.find(root)
    assert found is not None and found.path.name == "iter_0000006"
    assert files.find(root, 3) == files.Found(tmp_path / "iter_0000003", 3)
    with pytest.raises(DataError, match="there are: iter_0000003, iter_0000006"):
        files.find(root, 4)


def test_a_killed_save_leaves_the_one_before(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    (files.begin(tmp_path, 6) / "half").write_text("x")  # killed while writing
    found = files.find(str(tmp_path))
    assert found is not None and found.iteration == 3
    assert "interrupted" in files.tidy(tmp_path)[0]
    assert not files.unfinished(tmp_path)


def test_a_save_killed_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000003.replaced")
    found = files.find(str(tmp_path))
    assert found is not None and found.path.name == "iter_0000003.replaced"
    assert "restored" in files.tidy(tmp_path)[0]
    assert (tmp_path / "iter_0000003" / "state").read_text() == "3"


def test_a_save_of_another_job_is_left_alone(tmp_path: Path) -> None:
    _save(tmp_path / "here", 3)
    files.begin(tmp_path / "here", 6)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for save in (None, str(tmp_path / "there")):
        assert not files.tidy_own(argparse.Namespace(load=str(tmp_path / "here"), save=save))
    assert files.unfinished(tmp_path / "here")
    own = argparse.Namespace(load=str(tmp_path / "here"), save=str(tmp_path / "link"))
    assert "removed" in files.tidy_own(own)[0]
    assert not files.unfinished(tmp_path / "here")


def test_what_cannot_be_tidied_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 3)
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000003.replaced")
    files.begin(tmp_path, 6)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", read_only)
    monkeypatch.setattr(os, "rmdir", read_only)
    said = files.tidy(tmp_path)
    assert "cannot be removed" in said[0]
    assert said[1] == (
        "iter_0000003.replaced: used as it is; renaming it failed (Read-only file system)"
    )


def _torch_checkpoint(root: Path, *names: str) -> files.Found:
    path = files.begin(root, 1)
    for name in names:
        (path / name).mkdir()
        (path / name / "model_optim_rng.pt").write_bytes(b"x")
    files.commit(root, 1)
    found = files.find(str(root))
    assert found is not None
    return found


def test_a_torch_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    found = _torch_checkpoint(tmp_path, "mp_rank_00", "mp_rank_01")
    files.check_whole(found, tensor=2, pipeline=1)
    with pytest.raises(DataError, match="cannot change its tensor, pipeline or expert"):
        files.check_whole(found, tensor=1, pipeline=2)
    (found.path / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(DataError, match=r"mp_rank_01/model_optim_rng\.pt: missing"):
        files.check_whole(found, tensor=2, pipeline=1)


def test_a_torch_checkpoint_with_expert_parallelism_is_read(tmp_path: Path) -> None:
    found = _torch_checkpoint(tmp_path / "a", "mp_rank_00_000", "mp_rank_00_001")
    files.check_whole(found, tensor=1, pipeline=1, expert=2)
    with pytest.raises(DataError, match="this run needs mp_rank_00:"):
        files.check_whole(found, tensor=1, pipeline=1)
    found = _torch_checkpoint(tmp_path / "b", "mp_rank_00_000", "mp_rank_01_001")
    files.check_whole(found, tensor=2, pipeline=1, expert=2, expert_tensor=1)
    names = [f"mp_rank_0{t}_00{p}_00{e}" for t in (0, 1) for p in (0, 1) for e in (0, 1)]
    found = _torch_checkpoint(tmp_path / "c", *names)
    files.check_whole(found, tensor=2, pipeline=2, expert=2, expert_tensor=2)


def test_a_broken_tracker_is_refused(tmp_path: Path) -> None:
    (tmp_path / files.TRACKER).write_text("soon")
    with pytest.raises(DataError, match="holds 'soon'"):
        files.find(str(tmp_path))


def test_settings_of_communicators_are_read_before_processes_start(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    args = parse_args(["--mock-data", "--nccl-communicator-config-path", str(path)])
    with pytest.raises(DataError, match=r"--nccl-communicator-config-path .*: No such file"):
        check_files(args, "gpt")
    path.write_text("tp: 8\n")
    with pytest.raises(DataError, match="settings for each process group"):
        check_files(args, "gpt")
    path.write_text("tp: {min_ctas: 8}\n")
    check_files(args, "gpt")
