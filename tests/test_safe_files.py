"""Links, pipes and devices in the place of a run's files: refused, nothing lost or waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.dpp_train.checkpoint import (
    checksums,
    durable,
)
from megatron.dpp_train.checkpoint import (
    files as checkpoint_files,
)
from megatron.dpp_train.checkpoint import (
    reader as checkpoint_reader,
)
from megatron.dpp_train.hf.to_megatron import unfinished
from megatron.dpp_train.launch.log_copy import copy_output
from megatron.dpp_train.loop.metrics import MetricsFile
from megatron.dpp_train.options.yaml_file import defaults_from_yaml
from megatron.dpp_train.state import note_progress
from megatron.dpp_train.tokenizers import build_tokenizer
from megatron.dpp_train.tokenizers.template_files import find_templates

from megatron.dpp import locks
from megatron.dpp.errors import DataError, DppError
from megatron.dpp.index_files import read_lengths
from megatron.dpp.report.pictures.picture import Picture
from megatron.dpp.report.reader import read_header
from megatron.dpp.report.run_files import write_state
from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp.schedule import Geometry
from megatron.dpp.schedule.recording import DecisionRecorder, Recording
from megatron.dpp.sim.measured import load_costs
from megatron.dpp.trace import TraceLayout, open_recorder
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.weights import find_weights
from megatron.dpp_train.text_files import read_mapping, read_text

VICTIM = b"years of work"
_LAYOUT = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)
_TRACE = str(_LAYOUT.path("."))


@pytest.fixture(autouse=True)
def _no_test_waits_for_ever() -> Iterator[None]:
    signal.alarm(60)  # ends the process; nothing below takes long
    yield
    signal.alarm(0)


def _progress(folder: Path) -> None:
    args = SimpleNamespace(log_progress=True, save=str(folder), world_size=1)
    run: Any = SimpleNamespace(args=args, is_first=True, say=lambda _: None)
    note_progress(run, "Starting job")


WRITTEN: dict[str, Callable[[Path], object]] = {
    ".lock": lambda folder: locks.lock_directory(folder, "--save").close(),
    "latest_checkpointed_iteration.new": lambda folder: checkpoint_files.write_tracker(folder, 1),
    "settings.new": lambda folder: durable.write_text(folder / "settings.new", "lr: 1\n"),
    "progress.txt": _progress,
    "metrics.jsonl": lambda folder: MetricsFile(str(folder / "metrics.jsonl")).close(),
    "order.rank0": lambda folder: DecisionRecorder(
        str(folder / "order"), Geometry(1, 0, 1, 1)
    ).close(),
    "state.json": lambda folder: write_state(folder, "running"),
    _TRACE: lambda folder: open_recorder(folder, rank=0, layout=_LAYOUT).close(),
    "train.log": lambda folder: copy_output(folder / "train.log"),
    "picture.svg": lambda folder: Picture("picture", 100).write(folder / "picture.svg"),
    ".checksums-0": lambda folder: checksums.note(folder, [], 0),
}
"""File -> writes it."""


@pytest.mark.parametrize("trap", ["link", "dangling link", "hard link", "pipe"])
@pytest.mark.parametrize("name", WRITTEN)
def test_no_file_of_somebody_else_is_written(name: str, trap: str, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    victim.write_bytes(VICTIM)
    if trap == "pipe":
        os.mkfifo(place)
    elif trap == "hard link":
        place.hardlink_to(victim)
    else:
        place.symlink_to(victim if trap == "link" else tmp_path / "new")
    with contextlib.suppress(DppError, OSError):
        WRITTEN[name](tmp_path / "run")
        assert name == "progress.txt"  # of lines for people: the run goes on
    assert victim.read_bytes() == VICTIM
    assert not (tmp_path / "new").exists()
    assert os.path.lexists(place)  # for whoever looks what it is


def test_a_lock_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / locks.LOCK_NAME
    path.touch(mode=0o644)
    with locks.lock_directory(tmp_path, "--save"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("user", ["another", "root"])
def test_a_lock_of_another_user_is_named(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / locks.LOCK_NAME).touch()
    number = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: 0 if user == "root" else number + 1)
    if user == "root":  # over NFS its files are nobody's
        locks.lock_directory(tmp_path, "--save").close()
        return
    with pytest.raises(DataError, match=rf"--save .*\.lock: belongs to user number {number}"):
        locks.lock_directory(tmp_path, "--save")


def test_nobody_enters_a_checkpoint_before_it_is_whole(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        path = checkpoint_files.begin(tmp_path, 1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        checkpoint_files.commit(tmp_path, 1)
        final = checkpoint_files.directory(tmp_path, 1)
        assert stat.S_IMODE(final.stat().st_mode) == 0o775
    finally:
        os.umask(before)


def test_a_conversion_enters_no_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "victim" / "new").mkdir(parents=True)
    (tmp_path / ".model.unfinished").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match="is a link"), unfinished(tmp_path / "model"):
        pass
    assert (tmp_path / "victim" / "new").is_dir()


def _checksums(path: Path) -> object:
    path.rename(path.with_name(checksums.NAME))
    return checksums.read(path.parent)


def _tokenizer(path: Path) -> object:
    return build_tokenizer("BertWordPieceLowerCase", str(path), None)


READ: dict[str, Callable[[Path], object]] = {
    "text": read_text,
    "template": lambda path: find_templates(str(path), None),
    "yaml": read_mapping,
    "--yaml-cfg": lambda path: defaults_from_yaml(str(path), ArgumentParser()),
    "vocabulary": _tokenizer,
    "checksums.json": _checksums,
    "checked": lambda path: checksums.check(path.parent, {path.name: ""}, [path.name]),
    ".metadata": checkpoint_reader.read_pickle,
    "loaded .metadata": checkpoint_reader.load_plain,
    "common.pt": checkpoint_reader.read_archive,
    "corpus.idx": lambda path: read_lengths(str(path.with_suffix(""))),
    "corpus.jsonl": lambda path: list(preprocess.read_batches([str(path)])),
    "corpus.jsonl.gz": lambda path: list(preprocess.read_batches([str(path)])),
    "config.json": lambda path: read_config(path.parent),
    "model.safetensors": lambda path: find_weights(path.parent),
    "costs": load_costs,
    "trace": read_header,
    "order.rank0": lambda path: Recording.load(str(path.with_suffix("")), 0),
}
"""What a start reads -> reads it."""


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "socket", "directory"])
@pytest.mark.parametrize("name", READ)
def test_only_a_regular_file_is_read(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.symlink_to(kind)
    with pytest.raises((DppError, OSError)):
        READ[name](path)


def test_a_text_may_hold_the_bytes_of_a_name(tmp_path: Path) -> None:
    """The report of a run whose name is no UTF-8 ended with a traceback."""
    with open_text_to_write(tmp_path / "page") as file:
        file.write("run\udcff \u6a21")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "run\\udcff \u6a21"


@pytest.mark.parametrize("name", READ)
def test_what_git_lfs_leaves_in_the_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises((DppError, OSError), match=r"pointer of Git LFS.* git lfs pull") as error:
        READ[name](path)
    assert str(tmp_path) in str(error.value)
