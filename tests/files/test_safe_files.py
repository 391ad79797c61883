"""Links, pipes and devices in the place of a run's files: refused, nothing lost or waited for."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.dpp.errors import DppError
from megatron.dpp.files import locks
from megatron.dpp.files.index_files import read_lengths
from megatron.dpp.files.safe_files import (
    open_text_to_write,
    open_to_read,
    read_bytes,
    replacing,
)
from megatron.dpp.report.reader import read_header
from megatron.dpp.report.run_files import write_state
from megatron.dpp.schedule import Geometry
from megatron.dpp.schedule.recording import DecisionRecorder, Recording
from megatron.dpp.trace import TraceLayout, open_recorder
from megatron.dpp_train.text_files import read_json, read_text

VICTIM = b"years of work"
_LAYOUT = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)
_TRACE = str(_LAYOUT.path("."))


@pytest.fixture(autouse=True)
def _no_test_waits_for_ever() -> Iterator[None]:
    signal.alarm(60)  # ends the process; nothing below takes long
    yield
    signal.alarm(0)


def _replaced(path: Path) -> None:
    with replacing(str(path)) as file:
        file.write(b"new")


WRITTEN: dict[str, Callable[[Path], object]] = {
    ".lock": lambda folder: locks.lock_directory(folder, "--save").close(),
    "order.rank0": lambda folder: DecisionRecorder(
        str(folder / "order"), Geometry(1, 0, 1, 1)
    ).close(),
    "state.json": lambda folder: write_state(folder, "running"),
    _TRACE: lambda folder: open_recorder(folder, rank=0, layout=_LAYOUT).close(),
    "replaced": lambda folder: _replaced(folder / "replaced"),
    "text": lambda folder: open_text_to_write(folder / "text").close(),
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
    with pytest.raises((DppError, OSError)):
        WRITTEN[name](tmp_path / "run")
    assert victim.read_bytes() == VICTIM
    assert not (tmp_path / "new").exists()
    assert os.path.lexists(place)  # for whoever looks what it is


READ: dict[str, Callable[[Path], object]] = {
    "bytes": read_bytes,
    "text": read_text,
    "json": read_json,
    "corpus.idx": lambda path: read_lengths(str(path.with_suffix(""))),
    "trace": read_header,
    "order.rank0": lambda path: Recording.load(str(path.with_suffix("")), 0),
}
"""What a start reads -> reads it."""


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "socket", "directory", "pointer", "\0"])
@pytest.mark.parametrize("name", READ)
def test_only_a_regular_file_is_read(name: str, kind: str, tmp_path: Path) -> None:
    """A pointer of Git LFS is named with the command that fetches the file."""
    path, said = tmp_path / name, "."
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        said = r"pointer of Git LFS.* git lfs pull"
    elif kind == "\0":
        path, said = tmp_path / "a\0b" / name, "is no name of a file"
    else:
        path.symlink_to(kind)
    with pytest.raises((DppError, OSError), match=said):
        READ[name](path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state"
    _replaced(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, before[1]))
    try:
        with pytest.raises(OSError, match="too large"), replacing(str(path)) as file:
            file.write(b"longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]
    with open_to_read(path) as reader:
        with replacing(str(path)) as file:
            file.write(b"newer")
        assert (path.read_bytes(), reader.read()) == (b"newer", b"new")


def test_a_text_may_hold_the_bytes_of_a_name(tmp_path: Path) -> None:
    """The report of a run whose name is no UTF-8 ended with a traceback."""
    with open_text_to_write(tmp_path / "page") as file:
        file.write("run\udcff \u6a21")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "run\\udcff \u6a21"
