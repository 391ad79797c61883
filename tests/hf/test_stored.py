"""Checkpoints that are read for an export: padded and shared tensors, and what must not be left."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf import Entry, Part, checkpoint
from megatron.dpp_train.hf.to_hf import to_hf
from tests.harmful import Harmful
from tests.hf.test_convert import tensors_of


def entry_of(key: str, *shape: int, **changes: Any) -> Entry:
    """An entry of one part, without layers."""
    usual = {"rule": "same", "twin": False, "by_vocab": False, "parts": (Part("w", shape),)}
    return Entry(key, (), (), shape, **usual | changes)


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these tensors."""
    folder.mkdir()
    sizes: Any = SimpleNamespace(layers=0, experts=0)
    found = [entry_of(key, *tensor.shape) for key, tensor in tensors.items()]
    checkpoint.write(
        folder, found, sizes, torch.float32, lambda each: tensors[each.key], argparse.Namespace()
    )
    return folder


@contextlib.contextmanager
def metadata_of(folder: Path) -> Iterator[Any]:
    """The list of a checkpoint's tensors, which a test may change."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def test_reading_a_checkpoint_runs_nothing_that_it_names(tmp_path: Path) -> None:
    folder = written(tmp_path / "ckpt", {"k": torch.ones(2)})
    torch.save(Harmful(tmp_path / "made"), folder / "shard")
    with metadata_of(folder) as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == "k":
                info.relative_path, info.offset = "shard", 0
                info.length = (folder / "shard").stat().st_size
    with pytest.raises(DataError, match="shard: unreadable"):
        checkpoint.Stored(folder).read(entry_of("k", 2))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("rows", "width", "fits"), [(96, 8, True), (128, 8, True), (95, 8, False), (96, 9, False)]
)
def test_a_vocabulary_may_be_padded_and_not_cut(
    rows: int, width: int, fits: bool, tmp_path: Path
) -> None:
    stored = checkpoint.Stored(written(tmp_path / "x", {"k": torch.zeros(rows, width)}))
    refusal = pytest.raises(
        DataError, match=rf"x: k is \[{rows}, {width}\], the model's is \[96, 8"
    )
    with contextlib.nullcontext() if fits else refusal:
        stored.check(entry_of("k", 96, 8, by_vocab=True))


def test_a_padded_vocabulary_is_read_from_the_parts_of_several_ranks(tmp_path: Path) -> None:
    whole = torch.arange(102.0 * 8).reshape(102, 8)
    firsts = (0, 34, 68)
    folder = written(tmp_path / "x", {f"{at}": whole[at : at + 34] for at in firsts})
    entry = entry_of("k", 96, 8, by_vocab=True)
    for kept in (firsts, firsts[1:]):
        with metadata_of(folder) as metadata:
            places = {index.fqn: info for index, info in metadata.storage_data.items()}
            of_part = metadata.state_dict_metadata["0"]
            offsets = {at: torch.Size((at, 0)) for at in kept}
            metadata.state_dict_metadata["k"] = dataclasses.replace(
                of_part, size=torch.Size((102, 8)),
                chunks=[dataclasses.replace(of_part.chunks[0], offsets=each)
                        for each in offsets.values()],
            )  # fmt: skip
            for at in firsts:
                metadata.storage_data.pop(MetadataIndex("k", torch.Size((at, 0))), None)
            for at, offset in offsets.items():
                metadata.storage_data[MetadataIndex("k", offset)] = places[f"{at}"]
        stored = checkpoint.Stored(folder)
        if kept == firsts:
            assert torch.equal(stored.read(entry), whole[:96])
            continue
        with pytest.raises(DataError, match="x: k is not whole"):
            stored.read(entry)


class Written:
    """A family that adds nothing to a config."""

    name: ClassVar[str] = "f"
    written: ClassVar[dict[str, Any]] = {}

    def __str__(self) -> str:
        return "f"


class Export:
    """Exports checkpoints of a model with one matrix, which two names may hold."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._count = tmp_path, 0
        self.config: Any = SimpleNamespace(family=Written(), sizes=None, content={})
        part = Part("w", (2, 3))
        both = [entry_of("a", 2, 3, parts=(part,)), entry_of("b", 2, 3, parts=(part,), twin=True)]
        (tmp_path / "like").mkdir()
        for name, result in (
            ("entries", lambda *_: both), ("saved_args", lambda found: None),
            ("read_config", lambda *_: self.config),
        ):  # fmt: skip
            monkeypatch.setattr(f"megatron.dpp_train.hf.to_hf.{name}", result)

    def __call__(self, dtype: torch.dtype | None = None, **tensors: torch.Tensor) -> Path:
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        source = written(place / "x", named)
        to_hf(
            source, place / "out", like=self._folder / "like", dtype=dtype, progress=lambda _: None
        )
        return place / "out"


def test_twins_are_read_once_and_nothing_may_be_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, other = Export(tmp_path, monkeypatch), torch.zeros(1)
    one, two, wrong = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.ones(3, 2)
    state = {"decoder__layers__mlp__linear_fc1___extra_state": other}
    for given, first in (
        ({"a": one, "b": two}, 1.0), ({"a": one, "optimizer__state": other}, 1.0),
        ({"b": two}, 2.0), ({"a": one, **state}, 1.0),
    ):  # fmt: skip
        assert tensors_of(export(**given))["w"].unique().tolist() == [first]
    for given, said in (
        ({"a": one, "c": other}, "x: holds c, which f does not have"),
        ({"optimizer__state": other}, "x: holds no a; it is of another model"),
        ({"a": wrong, "b": one}, r"x: a is \[3, 2\], the model's is \[2, 3"),
        ({"b": wrong}, r"x: b is \[3, 2\], the model's is \[2, 3"),
    ):
        with pytest.raises(DataError, match=said):
            export(**given)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_config_says_the_type_under_the_name_that_it_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer folders have ``dtype``; two names would contradict each other."""
    export = Export(tmp_path, monkeypatch)
    export.config.content = {name: "float32", "head_dim": 8}
    folder = export(torch.bfloat16, a=torch.ones(2, 3))
    content = json.loads((folder / "config.json").read_text())
    assert content == {name: "bfloat16", "head_dim": 8}
