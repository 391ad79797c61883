"""Checkpoints whose bits changed on disk are refused, and the file is named."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checksums, guards
from megatron.dpp_train.checkpoint import files as files
from tests.checkpoint.test_full_disk import run
from tests.loop.several import train_each

FORMS = {
    "sync": "",
    "async": "--async-save",
    "torch": "--ckpt-format torch --use-distributed-optimizer",
}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def named_and_checked(path: Path) -> None:
    sums = checksums.read(path)
    assert sums is not None
    checksums.check(path, sums, list(sums))


def test_a_rank_notes_the_files_that_it_wrote_and_no_others(tmp_path: Path) -> None:
    for name in ("__1_0.distcp", "__1_1.distcp", "__10_0.distcp", "__0_1.distcp", "common.pt"):
        (tmp_path / name).write_text(name)
    guards.note_shards(tmp_path, 1)
    (note,) = tmp_path.glob(".checksums-*")
    assert sorted(json.loads(note.read_text())) == ["__1_0.distcp", "__1_1.distcp"]


def test_100_checkpoints_with_one_flipped_bit_are_refused_by_name(tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(100):
        target = files.begin(tmp_path, number)
        (target / "mp_rank_00").mkdir()
        for name in (".metadata", "common.pt", "__0_0.distcp", "mp_rank_00/model_optim_rng.pt"):
            (target / name).write_bytes(draw.randbytes(draw.randrange(1, 3000)))
        checksums.note(target, [target / "__0_0.distcp"], rank=0)
        files.commit(tmp_path, number)
        path = files.directory(tmp_path, number)
        named_and_checked(path)
        names = sorted(each for each in path.rglob("*") if each.is_file())
        assert {str(each.relative_to(path)) for each in names} == {
            *(checksums.read(path) or {}),
            checksums.NAME,
        }
        victim = draw.choice(names)
        flip(victim, draw.randrange(victim.stat().st_size * 8))
        with pytest.raises(DataError, match=r"damaged|does not match itself") as refused:
            named_and_checked(path)
        assert str(path) in str(refused.value)
        assert victim.name in str(refused.value)


@pytest.mark.parametrize("torn", ["", '{"__0_0.dist', '{"__0_0.distcp": "\u00e9'])
def test_a_note_that_its_writer_left_unfinished_is_none(tmp_path: Path, torn: str) -> None:
    """A background writer reports no error of its note, and the shards are whole."""
    target = files.begin(tmp_path, 3)
    for rank in range(2):
        (target / f"__{rank}_0.distcp").write_text(f"shard {rank}")
        guards.note_shards(target, rank)
    (target / ".checksums-0").write_bytes(torn.encode()[: len(torn)])
    files.commit(tmp_path, 3)
    path = files.directory(tmp_path, 3)
    named_and_checked(path)
    assert set(checksums.read(path) or {}) == {"__0_0.distcp", "__1_0.distcp"}


def test_every_block_of_a_file_counts(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # blocks are of 1 MiB
    (tmp_path / "long").write_bytes(content)
    (tmp_path / "empty").touch()
    checksums.write(tmp_path)
    assert checksums.read(tmp_path) == {
        "long": f"{zlib.crc32(content):08x} {len(content)}", "empty": "00000000 0"
    }  # fmt: skip


def test_every_bit_of_the_checksums_themselves_counts(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"12345")
    checksums.write(tmp_path)
    whole = (tmp_path / checksums.NAME).read_bytes()
    for bit in range(len(whole) * 8):
        (tmp_path / checksums.NAME).write_bytes(whole)
        flip(tmp_path / checksums.NAME, bit)
        with pytest.raises(DataError, match=checksums.NAME):
            named_and_checked(tmp_path)


@pytest.mark.parametrize("source", ["load", "pretrained_checkpoint"])
def test_the_files_that_are_read_first_are_compared_before(source: str, tmp_path: Path) -> None:
    target = files.begin(tmp_path, 3)
    (target / "common.pt").write_bytes(bytes(100))
    files.commit(tmp_path, 3)
    flip(files.directory(tmp_path, 3) / "common.pt", 77)
    wanted = Namespace(
        load=None, ckpt_step=None, pretrained_checkpoint=None, exit_on_missing_checkpoint=False
    )
    setattr(wanted, source, str(tmp_path))
    with pytest.raises(DataError, match=r"iter_0000003/common.pt: damaged since it was saved"):
        files.find_start(wanted)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    lines = {
        name: f"--train-iters 1 --save-interval 9 --save DIR/{name} {form}"
        for name, form in FORMS.items()
    }
    alone = {"async": lines.pop("async")}  # each rank starts a manager, which imports PyTorch
    train_each(folder, 2, lines)
    train_each(folder, 1, alone)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_run_saves_checksums_of_every_file(saved: Path, form: str) -> None:
    path = files.directory(saved / form, 1)
    named_and_checked(path)
    there = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    sums = json.loads((path / checksums.NAME).read_text())["crc32"]
    assert {*sums, checksums.NAME} == there and len(sums) >= 2


@pytest.mark.parametrize("form", FORMS)
def test_any_flipped_bit_of_a_checkpoint_of_a_run_is_noticed(saved: Path, form: str) -> None:
    path, draw = files.directory(saved / form, 1), random.Random(form)
    names = sorted(each for each in path.rglob("*") if each.is_file())
    for _ in range(100):
        victim = draw.choice(names)
        bit = draw.randrange(victim.stat().st_size * 8)
        flip(victim, bit)
        with pytest.raises(DataError, match=victim.name):
            named_and_checked(path)
        flip(victim, bit)
    named_and_checked(path)


def test_a_run_refuses_a_damaged_checkpoint_and_loads_one_without_checksums(
    tmp_path: Path,
) -> None:
    assert run(f"--exit-interval 1 --save-interval 9 --save {tmp_path}").returncode == 0
    path = files.directory(tmp_path, 1)
    whole = tmp_path / "whole"
    shutil.copytree(path, whole)
    shards = sorted(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    flip(shards[-1], shards[-1].stat().st_size * 4)
    refused = run(f"--exit-interval 2 --load {tmp_path}")
    assert refused.returncode == 1
    assert f"error: rank 0: {shards[-1]}: damaged since it was saved" in refused.output
    shutil.rmtree(path)
    whole.rename(path)
    (path / checksums.NAME).unlink()
    older = run(f"--exit-interval 2 --load {tmp_path}")
    assert older.returncode == 0, older.output[-3000:]
    assert older.output.count("saved without checksums (checksums.json), loaded unverified") == 1


def test_damage_that_all_ranks_find_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(errors: list[str], own: str) -> None:
        errors[:] = [own, own, "", "another"]

    (tmp_path / checksums.NAME).write_text("no checksums")
    monkeypatch.setattr(guards.dist, "all_gather_object", gather)
    run: Any = Namespace(rank=0, args=Namespace(world_size=4))
    with pytest.raises(DataError) as told:
        guards.verify(run, files.Found(tmp_path, 1))
    one, other = str(told.value).rsplit("; ", 1)
    assert one.count(checksums.NAME) == 1 and other == "another"


@pytest.mark.parametrize("full", [True, False])
def test_a_background_write_notes_its_sums_and_reports_the_disk_by_its_shards(
    tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def note(target: Path, rank: int) -> None:
        told.append((target, rank))
        if full:
            raise OSError("no room")

    monkeypatch.setattr(guards, "note_shards", note)
    request = AsyncRequest(lambda *given: told.append(given), (1, 2), [])
    made = guards.noting(request, tmp_path, 3)
    made.async_fn(*made.async_fn_args)
    assert told == [(1, 2), (tmp_path, 3)]
    nothing = AsyncRequest(None, (), [])
    assert guards.noting(nothing, tmp_path, 3) is nothing
