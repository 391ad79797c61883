"""Pickles and archives that attack who reads a checkpoint."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
)

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import files, reader

_PLACE = {"relative_path": "__0_0.distcp", "offset": 0, "length": 8}


def built(kind: str, *states: Any) -> bytes:
    """A pickle of one object that ``states`` are given to, one after the other."""
    module, _, name = kind.rpartition(".")
    parts = [pickle.dumps(state, 2)[2:-1] + b"b" for state in states]
    return b"".join([b"\x80\x02c", f"{module}\n{name}\n".encode(), *parts, b"."])


def archive(path: Path, **contents: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(f"{name}/data.pkl", content)
    return path


@pytest.mark.parametrize(
    "kind",
    ["pathlib.PosixPath", "torch.distributed.checkpoint.metadata.MetadataIndex"],
)
def test_a_pickle_changes_no_class(kind: str, tmp_path: Path) -> None:
    """An attribute of the class came from the file, for the rest of the process."""
    file = tmp_path / ".metadata"
    file.write_bytes(built(kind, (None, {"__hash__": None, "planted": 1})))
    before = [dict(vars(each)) for each in (MetadataIndex, type(Path()))]
    with pytest.raises(DataError, match=r"\.metadata: asks for a change of "):
        reader.load_plain(file)
    assert [dict(vars(each)) for each in (MetadataIndex, type(Path()))] == before


def test_an_archive_changes_no_namespace(tmp_path: Path) -> None:
    """Each parser of the process would have had the attribute."""
    path = archive(tmp_path / "common.pt", x=built("argparse.Namespace", (None, {"planted": 1})))
    with pytest.raises(DataError, match=r"a change of argparse\.Namespace"):
        reader.read_archive(path)
    assert not hasattr(argparse.Namespace(), "planted")


def test_a_second_state_of_an_object_is_seen_by_the_check(tmp_path: Path) -> None:
    """The check saw the file beside `.metadata`, and a rank opened /dev/zero."""
    part = "torch.distributed.checkpoint.filesystem._StorageInfo"
    place = built(part, _PLACE, (None, {"relative_path": "/dev/zero"}))[2:-1]
    place = place.replace(b"_StorageInfo\n", b"_StorageInfo\n)\x81", 1)  # an object of the class
    whole = pickle.dumps(Metadata({}, None, {MetadataIndex("w"): 77777}), 2)
    (tmp_path / ".metadata").write_bytes(whole.replace(pickle.dumps(77777, 2)[2:-1], place, 1))
    for name in ("common.pt", "metadata.json", "__0_0.distcp"):
        (tmp_path / name).write_bytes(bytes(8))
    with pytest.raises(DataError, match="a tensor is in '/dev/zero'"):
        files.check_whole(files.Found(tmp_path, 0), 1, 1)


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_an_archive_has_one_pickle(names: tuple[str, ...], tmp_path: Path) -> None:
    path = archive(tmp_path / "common.pt", **dict.fromkeys(names, pickle.dumps({})))
    with pytest.raises(DataError, match=f"holds {len(names)} files data.pkl, expected one"):
        reader.read_archive(path)


def test_an_archive_does_not_unpack_to_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of zeros that were packed became as many gigabytes."""
    monkeypatch.setattr(reader, "MOST_PICKLE_BYTES", 1 << 20)
    path = archive(tmp_path / "common.pt", x=bytes(2 << 20))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(DataError, match=r"x/data.pkl has 2097152 bytes, 1048576 at most are read"):
        reader.read_archive(path)


@pytest.mark.parametrize("name", ["nothing", "__class__", 1, None, ["x"]])
def test_only_members_of_enumerations_are_named(name: Any) -> None:
    """Another name was a KeyError or a TypeError."""
    with pytest.raises(DataError, match=r"_MEM_FORMAT_ENCODING, which is not run"):
        reader.member_of(_MEM_FORMAT_ENCODING, name)
