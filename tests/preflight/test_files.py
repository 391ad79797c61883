"""Data files and checkpoint directories: valid and refused ones."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.index_files import check_index
from megatron.dpp_train.checkpoint import checksums
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.preflight.files import (
    check_data,
    check_files,
    check_split,
    check_start,
    check_tokens,
    warnings_of_data,
)


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
    assert check_index(str(prefix)) == (2, 2)
    whole = prefix.with_suffix(".idx").read_bytes()
    prefix.with_suffix(".bin").write_bytes(b"\0" * 13)
    with pytest.raises(DataError, match=r"data\.bin: 13 bytes, but data\.idx says 14"):
        check_index(str(prefix))
    prefix.with_suffix(".idx").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="cut short"):
        check_index(str(prefix))
    prefix.with_suffix(".bin").write_bytes(b"\0" * 14)
    prefix.with_suffix(".idx").write_bytes(whole + b"\0\0")  # a mode for each sequence
    assert check_index(str(prefix)) == (2, 2)
    for more in (1, 3):
        prefix.with_suffix(".idx").write_bytes(whole + b"\0" * more)
        with pytest.raises(DataError, match="bytes, but its header says"):
            check_index(str(prefix))
    prefix.with_suffix(".idx").write_bytes(b"no index" + whole)
    with pytest.raises(DataError, match="bad header"):
        check_index(str(prefix))


def test_indices_of_samples_that_cannot_be_kept_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus in a directory that a user may only read ended a run with megatron-core's Exception,
    whose advice named a field of its configuration."""
    _write_index(tmp_path / "data", [3] * 2000)
    words = f"--data-path {tmp_path}/data --split 1,0,0 --seq-length 2"
    probe = tempfile.TemporaryFile

    def read_only(dir: Path) -> Any:
        if dir == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return probe(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    why = r"/data/cache, and .* is not writable \(Read-only file system\): .*--data-cache-path"
    with pytest.raises(DataError, match=why):
        check_data(parse_args(words.split()), "gpt")
    (tmp_path / "elsewhere").mkdir()
    check_data(parse_args(f"{words} --data-cache-path {tmp_path}/elsewhere/x".split()), "gpt")
    (tmp_path / "data" / "cache" / "GPTDataset_indices").mkdir(parents=True)
    (tmp_path / "data" / "cache" / "GPTDataset_indices" / "x-description.txt").touch()
    check_data(parse_args(words.split()), "gpt")


def test_berts_prefixes_need_weights(tmp_path: Path) -> None:
    """megatron-core cannot make as many samples of masked words as are asked for."""
    prefix = str(tmp_path / "data")
    _write_index(Path(prefix), [3, 4])
    flags = f"--split 1 --data-path {prefix} {prefix}".split()
    check_files(parse_args(flags), "gpt")
    check_files(parse_args(["--split", "1", "--data-path", "1", prefix, "1", prefix]), "bert")
    with pytest.raises(ConfigError, match="give every prefix a weight"):
        check_files(parse_args(flags), "bert")


def _data(prefix: str | Path, *flags: str, vocab_size: int = 100) -> argparse.Namespace:
    args = parse_args(["--data-path", str(prefix), "--seq-length", "7", *flags])
    args.padded_vocab_size, args.loss_vocab_size = vocab_size, None
    args.variable_lengths = False
    return args


def test_token_ids_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_index(prefix, [3, 4])
    for last, refused in ((98, None), (99, None), (100, 100), (65535, 65535)):
        prefix.with_suffix(".bin").write_bytes(struct.pack("<7H", 0, 5, 99, 1, last, 0, 7))
        with (
            pytest.raises(
                DataError, match=f"token id {refused} is outside of the model's vocabulary of 100;"
            )
            if refused
            else contextlib.nullcontext()
        ):
            check_tokens(_data(prefix))  # type: ignore[arg-type]
    check_tokens(_data(prefix, "--mock-data"))  # type: ignore[arg-type]
    index = prefix.with_suffix(".idx")
    index.write_bytes(
        index.read_bytes().replace(struct.pack("<QB", 1, 8), struct.pack("<QB", 1, 3))
    )
    with pytest.raises(DataError, match="token id -1 is outside"):
        check_tokens(_data(prefix))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, (1 << 21) - 1, 1 << 21, 2_999_999])
def test_every_token_of_a_file_is_looked_at(place: int, tmp_path: Path) -> None:
    """In blocks of 4 MiB, of which the last may be short."""
    prefix = tmp_path / "data"
    _write_index(prefix, [3_000_000])
    tokens = numpy.ones(3_000_000, dtype="u2")
    tokens[place] = 100
    tokens.tofile(prefix.with_suffix(".bin"))
    check_tokens(_data(prefix, vocab_size=101))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data\.bin: token id 100 is outside .* of 100"):
        check_tokens(_data(prefix))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "warned"), [(6, True), (7, True), (8, False)])
def test_a_sample_has_one_token_more_than_a_sequence(
    tokens: int, warned: bool, tmp_path: Path
) -> None:
    prefix = tmp_path / "data"
    _write_index(prefix, [tokens])
    said = warnings_of_data(_data(prefix), "gpt")
    assert len(said) == warned and all(f"holds {tokens} tokens" in line for line in said)
    assert not warnings_of_data(_data(prefix), "bert")
    assert not warnings_of_data(_data(prefix, "--mock-data"), "gpt")


@pytest.mark.parametrize(
    ("words", "prefixes"),
    [(["7"], ["7"]), (["1", "a", "2.5", "b"], ["a", "b"]), (["a", "b"], ["a", "b"]),
     (["1", "2", "3"], ["1", "2", "3"])],
)  # fmt: skip
def test_weights_stand_before_every_prefix_or_before_none(
    words: list[str], prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read: list[str] = []
    monkeypatch.setattr(
        "megatron.dpp_train.preflight.files.check_index",
        lambda prefix: read.append(prefix) or (1000, 1000),
    )
    check_files(parse_args(["--split", "1", "--data-path", *words]), "gpt")
    assert read == prefixes


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


def test_what_killed_jobs_left_beside_a_whole_checkpoint_goes(tmp_path: Path) -> None:
    """One died before it deleted what it had replaced, another while it deleted an old one."""
    _save(tmp_path, 3)
    left = [tmp_path / f"iter_000000{name}" for name in ("3.replaced", "1.removed", "3.removed")]
    for path in left:
        path.mkdir()
        (path / "state").write_text("old")
    assert files.tidy(tmp_path) == []
    assert not any(path.exists() for path in left)
    assert (tmp_path / "iter_0000003" / "state").read_text() == "3"


def test_a_save_again_passes_over_what_the_one_before_could_not_delete(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    left = tmp_path / "iter_0000003.replaced"
    left.mkdir()
    (left / "state").write_text("old")
    _save(tmp_path, 3)
    assert not left.exists()
    assert (tmp_path / "iter_0000003" / "state").read_text() == "3"


def test_a_reader_of_the_tracker_sees_one_whole_number(tmp_path: Path) -> None:
    """The tracker is replaced, since a file written in place is empty for a moment."""
    _save(tmp_path, 3)
    with (tmp_path / files.TRACKER).open() as reader:
        _save(tmp_path, 6)
        assert reader.read() == "3"
    assert (tmp_path / files.TRACKER).read_text() == "6"


def test_a_second_attempt_keeps_nothing_of_the_first(tmp_path: Path) -> None:
    (files.begin(tmp_path, 3) / "stale").write_text("x")
    assert not list(files.begin(tmp_path, 3).iterdir())


def _start(**changes: Any) -> argparse.Namespace:
    given = {
        "load": None, "ckpt_step": None, "pretrained_checkpoint": None, "finetune": False,
        "exit_on_missing_checkpoint": False,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


def test_a_run_starts_from_its_own_checkpoint_and_else_from_a_pretrained_one(
    tmp_path: Path,
) -> None:
    own, pretrained = tmp_path / "own", tmp_path / "pretrained"
    args = _start(load=str(own), pretrained_checkpoint=str(pretrained))
    with pytest.raises(DataError, match=r"--pretrained-checkpoint .*: no checkpoint there"):
        files.find_start(args)
    _save(pretrained, 3)
    args = _start(load=str(own), pretrained_checkpoint=str(pretrained))
    found = files.find_start(args)
    assert found == files.Found(pretrained / "iter_0000003", 3, pretrained=True)
    _save(own, 6)
    args = _start(load=str(own), pretrained_checkpoint=str(pretrained))
    assert files.find_start(args) == files.Found(own / "iter_0000006", 6)


def test_the_step_to_load_may_be_a_pretrained_checkpoints(tmp_path: Path) -> None:
    """As in Megatron-LM: of ``--load`` once that has a checkpoint, else of the pretrained one."""
    own, pretrained = tmp_path / "own", tmp_path / "pretrained"
    _save(pretrained, 3)
    _save(pretrained, 6)
    for load in (None, str(own)):
        args = _start(load=load, pretrained_checkpoint=str(pretrained), ckpt_step=3)
        found = files.find_start(args)
        assert found == files.Found(pretrained / "iter_0000003", 3, pretrained=True)
    _save(own, 3)
    assert files.find_start(args) == files.Found(own / "iter_0000003", 3)
    args.ckpt_step = 6
    with pytest.raises(DataError, match=r"no such checkpoint; .*: iter_0000003 \(--ckpt-step"):
        files.find_start(args)


def test_a_missing_checkpoint_is_refused_where_asked(tmp_path: Path) -> None:
    assert files.find_start(_start(load=str(tmp_path))) is None
    assert files.find_start(_start(exit_on_missing_checkpoint=True)) is None
    with pytest.raises(DataError, match=r"no checkpoint there \(--exit-on-missing-checkpoint\)"):
        files.find_start(_start(load=str(tmp_path), exit_on_missing_checkpoint=True))
    _save(tmp_path, 3)
    assert files.find_start(_start(load=str(tmp_path), exit_on_missing_checkpoint=True))


def test_a_tracker_that_names_nothing_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    for text in ("", "soon", "-3"):
        (tmp_path / files.TRACKER).write_text(text)
        with pytest.raises(DataError, match=f"holds {text!r}, expected an iteration"):
            files.find(str(tmp_path))
    (tmp_path / files.TRACKER).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"iteration\.txt: not UTF-8 text"):
        files.find(str(tmp_path))
    (tmp_path / files.TRACKER).write_text("release\n")
    assert files.find(str(tmp_path)) == files.Found(tmp_path / "release", 0, release=True)


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
    (found.path / "mp_rank_01" / "model_optim_rng.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"mp_rank_01/model_optim_rng\.pt: missing or empty"):
        files.check_whole(found, tensor=2, pipeline=1)
    (found.path / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(DataError, match=r"mp_rank_01/model_optim_rng\.pt: missing"):
        files.check_whole(found, tensor=2, pipeline=1)


def test_a_torch_checkpoint_with_expert_parallelism_is_read(tmp_path: Path) -> None:
    found = _torch_checkpoint(tmp_path / "a", "mp_rank_00_000", "mp_rank_00_001")
    files.check_whole(found, tensor=1, pipeline=1, expert=2)
    with pytest.raises(DataError, match="this run needs mp_rank_00:"):
        files.check_whole(found, tensor=1, pipeline=1)
    found = _torch_checkpoint(tmp_path / "dense", "mp_rank_00", "mp_rank_01")
    files.check_whole(found, tensor=2, pipeline=1, expert=1, expert_tensor=4)  # no experts
    found = _torch_checkpoint(tmp_path / "b", "mp_rank_00_000", "mp_rank_01_001")
    files.check_whole(found, tensor=2, pipeline=1, expert=2, expert_tensor=1)
    whole = [f"mp_rank_0{t}_00{e}" for t in (0, 1) for e in (0, 1)]
    found = _torch_checkpoint(tmp_path / "wide", *whole)  # experts cut finer than the rest
    files.check_whole(found, tensor=2, pipeline=1, expert=2, expert_tensor=4)
    names = [f"mp_rank_0{t}_00{p}_00{e}" for t in (0, 1) for p in (0, 1) for e in (0, 1)]
    found = _torch_checkpoint(tmp_path / "c", *names)
    files.check_whole(found, tensor=2, pipeline=2, expert=2, expert_tensor=2)


def test_experts_are_cut_as_the_rest_is_unless_told(tmp_path: Path) -> None:
    """By ``--expert-tensor-parallel-size``, else by ``--tensor-model-parallel-size``."""
    whole = [f"mp_rank_0{t}_00{e}" for t in (0, 1) for e in (0, 1)]
    for own, names in ((None, whole), (2, whole), (1, ["mp_rank_00_000", "mp_rank_01_001"])):
        root = tmp_path / str(own)
        _torch_checkpoint(root, *names)
        args = parse_args(["--load", str(root)])
        args.tensor_model_parallel_size = args.expert_model_parallel_size = 2
        args.pipeline_model_parallel_size, args.expert_tensor_parallel_size = 1, own
        check_start(args)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ({"a": 30, "b": 5, "empty": 0}, None),
        ({"a": 31, "b": 5, "empty": 0}, None),
        ({"a": 29, "b": 5, "empty": 0}, r"/a: 29 bytes, expected at least 30"),
        ({"a": 30, "b": 0, "empty": 0}, r"/b: 0 bytes, expected at least 5"),
        ({"a": 30, "b": 5}, r"/empty: missing"),
    ],
)
def test_each_file_is_as_long_as_the_end_of_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, int], fault: str | None
) -> None:
    parts = [("a", 20, 10), ("a", 0, 20), ("b", 0, 5), ("empty", 0, 0)]
    stored = {
        number: argparse.Namespace(relative_path=name, offset=offset, length=length)
        for number, (name, offset, length) in enumerate(parts)
    }
    monkeypatch.setattr(files, "read_pickle", lambda _: argparse.Namespace(storage_data=stored))
    for name in ("metadata.json", "common.pt", ".metadata"):
        (tmp_path / name).write_text("{}")
    for name, size in written.items():
        (tmp_path / name).write_bytes(b"x" * size)
    found = files.Found(tmp_path, 1)
    with pytest.raises(DataError, match=fault) if fault else contextlib.nullcontext():
        files.check_whole(found, tensor=1, pipeline=1)
    (tmp_path / "common.pt").unlink()
    with pytest.raises(DataError, match=r"common\.pt: missing"):
        files.check_whole(found, tensor=1, pipeline=1)


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


def test_the_tracker_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a host that loses its power may leave an empty one."""
    told: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda _: told.append("sync"))
    monkeypatch.setattr(
        Path, "replace", lambda own, to: told.append(own.read_text()) or replace(own, to)
    )
    files.write_tracker(tmp_path, 7)
    assert told == ["sync", "7"]


def test_a_link_to_a_checkpoint_is_no_checkpoint_to_remove(tmp_path: Path) -> None:
    _save(tmp_path / "else", 3)
    link = tmp_path / "iter_0000003"
    link.symlink_to(tmp_path / "else" / "iter_0000003")
    files.remove(link)
    assert link.is_symlink() and (link / "state").read_text() == "3"
    files.remove(tmp_path / "else" / "iter_0000003")
    assert [path.name for path in (tmp_path / "else").iterdir()] == [files.TRACKER]


@pytest.mark.parametrize("head", ["metadata.json", "common.pt", ".metadata", "mp_rank_00/x"])
def test_a_checkpoint_may_be_named_itself_whatever_its_name(head: str, tmp_path: Path) -> None:
    for name in ("iter_0000012", "release", "mine"):
        path = tmp_path / name / head
        path.parent.mkdir(parents=True)
        path.write_text("")
        numbered = name == "iter_0000012"
        found = files.find_named(tmp_path / name)
        assert found == files.Found(tmp_path / name, 12 * numbered, release=not numbered)
        with pytest.raises(DataError, match="iter_0000005: no such checkpoint"):
            files.find_named(tmp_path / name, 5)
    with pytest.raises(DataError, match=r"missing, but there are iter_0000012"):
        files.find_named(tmp_path)
    _save(tmp_path / "mine", 5)  # a checkpoint that is a directory of checkpoints, too
    assert files.find_named(tmp_path / "mine", 5) == files.Found(
        tmp_path / "mine" / "iter_0000005", 5
    )


def test_a_file_that_changed_after_its_rank_wrote_it_is_damaged(tmp_path: Path) -> None:
    """Its own checksum counts, not that of what is on the disk when all are done."""
    (tmp_path / "state").write_text("whole")
    (tmp_path / "other").write_text("not noted")
    checksums.note(tmp_path, [tmp_path / "state"], 1)
    checksums.note(tmp_path, [], 0)
    (tmp_path / "state").write_text("torn!")
    checksums.write(tmp_path)
    sums = checksums.read(tmp_path)
    assert sums is not None and set(sums) == {"state", "other"}
    checksums.check(tmp_path, sums, ["other"])
    with pytest.raises(DataError, match="state: damaged since it was saved"):
        checksums.check(tmp_path, sums, ["other", "state"])
