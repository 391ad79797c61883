"""Tensors of ``torch_dist`` checkpoints, written and read one at a time, by one process."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.checkpoint import durable
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.reader import load_plain
from megatron.dpp_train.hf import Entry, Sizes
from megatron.dpp_train.hf.folder import some
from megatron.dpp_train.hf.rules import cast

_HEAD = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_STATES = (
    *("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
_EXPERT_STATES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")

_NO_MODEL = re.compile(
    r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state|iteration)"
    r"|.*\._extra_state"
)
"""Starts of the names of tensors that are no parameters."""

Read = Callable[[Entry], torch.Tensor]


class _Planner(DefaultSavePlanner):
    """Plans a checkpoint from shapes, and asks for each tensor when it is written."""

    def __init__(
        self, items: dict[MetadataIndex, Entry], states: list[str], kind: torch.dtype
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._items, self._states, self._dtype = items, states, kind
        self.read: Read = lambda entry: torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(_offset(entry), torch.Size(_local(entry))),
                    properties=TensorProperties(dtype=self._kind(entry)),
                    size=torch.Size((*entry.counts, *entry.shape)),
                ),
            )
            for index, entry in self._items.items()
        ]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._states]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        entry = self._items[write_item.index]
        return cast(self.read(entry), self._kind(entry), entry.key).reshape(_local(entry))

    def _kind(self, entry: Entry) -> torch.dtype:
        return torch.float32 if entry.full else self._dtype


def _local(entry: Entry) -> tuple[int, ...]:
    """The shape of an entry with its axes of layers and experts."""
    return (*(1 for _ in entry.place), *entry.shape)


def _offset(entry: Entry) -> torch.Size:
    return torch.Size((*entry.place, *(0 for _ in entry.shape)))


def _states(sizes: Sizes) -> list[str]:
    """Keys of the states of layers, which hold nothing. Loading asks for them all the same; those
    of Transformer Engine's layers are there, too."""
    keys = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(sizes.layers):
        prefix = f"decoder.layers.{layer}." if sizes.sparse else "decoder.layers."
        own = "/shard_0_1" if sizes.sparse else f"/shard_{layer}_{sizes.layers}"
        keys += [f"{prefix}{name}._extra_state{own}" for name in _STATES]
        for expert in range(sizes.experts):
            place = f"{expert}_{sizes.experts}"
            if not sizes.sparse:
                place = f"{layer}.{expert}_{sizes.layers}.{sizes.experts}"
            keys += [f"{prefix}{name}._extra_state/shard_{place}" for name in _EXPERT_STATES]
    return keys


def write(
    target: Path,
    entries: Sequence[Entry],
    sizes: Sizes,
    dtype: torch.dtype,
    read: Read,
    args: argparse.Namespace,
) -> None:
    """Write the checkpoint of a model into an empty directory.

    Args:
        read: gives the tensor of an entry; called once for each, in their order.
        args: what ``--use-checkpoint-args`` is to find.
    """
    planner = _Planner(
        {MetadataIndex(entry.key, _offset(entry)): entry for entry in entries},
        _states(sizes),
        dtype,
    )
    planner.read = read
    writer = FileSystemWriter(str(target), sync_files=False, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")  # as it should be
        try:
            save({}, storage_writer=writer, planner=planner)
        except CheckpointException as error:  # of a stack for each rank
            cause, _ = error.failures[0]
            if isinstance(cause, DataError):  # of what is read meanwhile
                raise cause from error
            if not isinstance(cause, OSError | RuntimeError):
                raise
            raise OSError(None, one_line(cause, 200), str(target / "__0_0.distcp")) from error
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0.0,
        "content_metadata": _CONTENT,
    }
    with durable.naming(target / "common.pt", RuntimeError):
        torch.save(common, target / "common.pt")
    durable.write_text(target / "metadata.json", json.dumps(_HEAD))


class _Chunk(NamedTuple):
    """A part of a tensor, and where its bytes are."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    info: Any


class Stored:
    """The tensors of a ``torch_dist`` checkpoint of any layout.

    Raises:
        DataError: it is damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not (path / "metadata.json").is_file():
            raise DataError(
                f"{path}: not in the format torch_dist, which convert reads (--ckpt-format)"
            )
        files.check_whole(files.Found(path, 0), 1, 1)
        metadata = load_plain(path / ".metadata")
        self._tensors = {
            key: each
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        sizes = {
            (key, chunk.offsets): tuple(chunk.sizes)
            for key, each in self._tensors.items()
            for chunk in each.chunks
        }
        self._chunks: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = defaultdict(list)
        for index, info in metadata.storage_data.items():
            if index.fqn in self._tensors:
                offset = tuple(index.offset)
                chunk = _Chunk(offset, sizes[index.fqn, index.offset], info)
                for leading in range(min(3, len(offset))):
                    self._chunks[index.fqn, offset[:leading]].append(chunk)

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type of an entry's tensor."""
        found: torch.dtype = self._tensors[self._find(entry)[0]].properties.dtype
        return found

    def holds(self, entry: Entry) -> bool:
        """True if there is a tensor of this entry."""
        return self._lookup(entry) is not None

    def check_rest(self, entries: Iterable[Entry], family: str) -> None:
        """Refuse a checkpoint with parameters of the model beside these entries."""
        used = {place[0] for place in map(self._lookup, entries) if place}
        rest = [key for key in self._tensors if key not in used and not _NO_MODEL.match(key)]
        if rest:
            raise DataError(f"{self._path}: holds {some(rest)}, which {family} does not have")

    def check(self, entry: Entry) -> None:
        """Refuse a checkpoint that lacks an entry, or has it in another shape."""
        key, place = self._find(entry)
        shape = tuple(self._tensors[key].size)
        wanted = (*entry.counts[len(entry.counts) - len(place) :], *entry.shape)
        fits = shape == wanted
        if entry.by_vocab:
            fits = shape[0] >= wanted[0] and shape[1:] == wanted[1:]
        if not fits:
            raise DataError(f"{self._path}: {key} is {list(shape)}, the model's is {list(wanted)}")

    def _find(self, entry: Entry) -> tuple[str, tuple[int, ...]]:
        found = self._lookup(entry)
        if found is None:
            raise DataError(f"{self._path}: holds no {entry.key}; it is of another model")
        return found

    def _lookup(self, entry: Entry) -> tuple[str, tuple[int, ...]] | None:
        """Name and leading indices of an entry, whose layers may be tensors of their own."""
        if entry.key in self._tensors:
            return entry.key, entry.place
        prefix = "decoder.layers."
        if entry.place:
            own = entry.key.replace(prefix, f"{prefix}{entry.place[0]}.")
            if own in self._tensors:
                return own, entry.place[1:]
        return None

    def read(self, entry: Entry) -> torch.Tensor:
        """The tensor of an entry; rows that pad the vocabulary are left out."""
        key, place = self._find(entry)
        chunks = self._chunks[key, place]  # along layers and experts each has one
        if len(chunks) == 1 and chunks[0].size[len(place) :] == entry.shape:
            return self._load(chunks[0].info).reshape(entry.shape)
        whole = torch.empty(entry.shape, dtype=self.dtype(entry))
        filled = 0
        for chunk in chunks:
            at, size = chunk.offset[len(place) :], chunk.size[len(place) :]
            box = tuple(
                slice(first, min(first + length, most))
                for first, length, most in zip(at, size, entry.shape, strict=True)
            )
            lengths = [each.stop - each.start for each in box]
            if min(lengths) > 0:
                inside = tuple(slice(0, length) for length in lengths)
                whole[box] = self._load(chunk.info).reshape(size)[inside]
                filled += math.prod(lengths)
        if filled != whole.numel():
            raise DataError(f"{self._path}: {key} is not whole")
        return whole

    def _load(self, info: Any) -> torch.Tensor:
        path = self._path / info.relative_path
        try:
            with open_to_read(path) as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            tensor: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises anything
            raise DataError(f"{path}: unreadable ({one_line(error)})") from error
        return tensor
