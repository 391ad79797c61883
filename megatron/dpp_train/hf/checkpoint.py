"""Tensors of ``torch_dist`` checkpoints, written and read one at a time, by one process."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import math
import pickle
import re
import resource
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.files.safe_files import open_to_read, read_bytes
from megatron.dpp_train.data.child import limit_memory
from megatron.dpp_train.hf.families import Sizes
from megatron.dpp_train.hf.folder import some
from megatron.dpp_train.hf.rules import cast
from megatron.dpp_train.hf.tables import Entry

TRACKER = "latest_checkpointed_iteration.txt"
_HEAD = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_COMMON = "common.pt"
_COMMON_KEY = "common_state/shard_0_1"
"""The plain state: a file of its own up to megatron-core 0.16, an object of the checkpoint since.
Newer releases read both, so that is what :func:`write` makes."""
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
_MEMORY_BYTES = 1 << 32
"""By which reading a pickle may grow: a damaged one may ask for a memo of 32 GiB."""

Read = Callable[[Entry], torch.Tensor]


class _Planner(DefaultSavePlanner):
    """Plans a checkpoint from shapes, and asks for each tensor when it is written."""

    def __init__(
        self, entries: Sequence[Entry], states: list[str], dtype: torch.dtype, read: Read
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._entries = {MetadataIndex(each.key, _offset(each)): each for each in entries}
        self._states, self._dtype, self._read = states, dtype, read

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
            for index, entry in self._entries.items()
        ]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._states]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        entry = self._entries[write_item.index]
        return cast(self._read(entry), self._kind(entry), entry.key).reshape(_local(entry))

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
    planner = _Planner(entries, _states(sizes), dtype, read)
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
    torch.save(common, target / _COMMON)
    (target / "metadata.json").write_text(json.dumps(_HEAD), encoding="utf-8")


def find(source: Path, step: int | None = None) -> Path:
    """The checkpoint at ``source``, which is one or a directory of them.

    Args:
        step: its iteration; the latest by default.

    Raises:
        DataError: there is none.
    """
    if (source / "metadata.json").is_file() and step is None:
        return source
    name = f"iter_{step:07d}" if step is not None else ""
    if step is None and (source / TRACKER).is_file():
        word = read_bytes(source / TRACKER, 64).decode("utf-8", "replace").strip()
        name = f"iter_{int(word):07d}" if word.isdecimal() else "release"
    found = source / name
    if not name or not found.is_dir():
        raise DataError(
            f"{found}: no checkpoint of Megatron is there, nor a folder with config.json"
        )
    if not (found / "metadata.json").is_file():
        raise DataError(f"{found}: not whole, or not in the format torch_dist (--ckpt-format)")
    return found


class _Anything:
    """Stands for an object of any class, and keeps its attributes."""

    state: Any = None

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                vars(self).update(part)


def _sizes(sizes: Iterable[int] = ()) -> tuple[int, ...]:
    """Stands for ``torch.Size``."""
    return tuple(sizes)


class _Unpickler(pickle.Unpickler):
    """Builds plain data, and stand-ins for all else; it imports nothing and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        known = {"OrderedDict": collections.OrderedDict, "set": set, "Size": _sizes}
        return known.get(name) or type(name, (_Anything,), {})

    def persistent_load(self, pid: object) -> None:
        return None


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(_MEMORY_BYTES)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _unpickled(content: bytes, where: object) -> Any:
    """The content of a pickle, or of a file of ``torch.save`` without its tensors.

    Raises:
        DataError: it is broken.
    """
    try:
        with _little_memory():
            if content[:2] == b"PK":
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    inner = [n for n in archive.namelist() if n.endswith("/data.pkl")]
                    content = archive.read(inner[0])
            return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a broken file raises anything
        raise DataError(f"{where}: unreadable ({one_line(error, 200)})") from error


class _Place(NamedTuple):
    """The bytes of a tensor or an object in a file."""

    file: Path
    offset: int
    length: int


class _Chunk(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: _Place


class Stored:
    """The tensors of a ``torch_dist`` checkpoint of any layout.

    Attributes:
        args: the arguments of the run that saved it, as attributes; None where it holds none.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path, file = path, path / ".metadata"
        self._chunks: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = defaultdict(list)
        try:
            metadata = _unpickled(read_bytes(file), file)
            found = self._read_common(self._read_index(metadata)).get("args")
            self.args: Any = found if isinstance(found, _Anything) else None
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; the checkpoint is not whole") from error
        except DataError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{file}: damaged ({one_line(error, 200)})") from error

    def _read_index(self, metadata: Any) -> _Place | None:
        """Find the parts of all tensors; returns the place of the plain state, if it has one."""
        self._tensors = {
            key: each
            for key, each in metadata.state_dict_metadata.items()
            if type(each).__name__ == "TensorStorageMetadata"
        }
        sizes = {
            (key, chunk.offsets): chunk.sizes
            for key, each in self._tensors.items()
            for chunk in each.chunks
        }
        for key, each in self._tensors.items():
            if not isinstance(each.properties.state[0], torch.dtype):
                raise TypeError(f"{key} has no type of PyTorch")
            each.size = tuple(each.size)
        common = None
        for index, info in metadata.storage_data.items():
            # in one of the checkpoint's own files
            file = self._path / Path(info.relative_path).name
            place = _Place(file, info.offset, info.length)
            if index.fqn in self._tensors:
                chunk = _Chunk(index.offset, sizes[index.fqn, index.offset], place)
                for leading in range(min(3, len(chunk.offset))):
                    self._chunks[index.fqn, chunk.offset[:leading]].append(chunk)
            elif index.fqn == _COMMON_KEY:
                common = place
        return common

    def _read_common(self, place: _Place | None) -> dict[str, Any]:
        """The plain state, from its own file or from the part of a file."""
        path = self._path / _COMMON
        if place is None and not path.is_file():
            return {}
        if place is None:
            found = _unpickled(read_bytes(path), path)
        else:
            found = _unpickled(_bytes(place), place.file)[0]
        return found if isinstance(found, dict) else {}

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type of an entry's tensor."""
        found: torch.dtype = self._tensors[self._find(entry)[0]].properties.state[0]
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
        shape = self._tensors[key].size
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
            return _load(chunks[0].place).reshape(entry.shape)
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
                whole[box] = _load(chunk.place).reshape(size)[inside]
                filled += math.prod(lengths)
        if filled != whole.numel():
            raise DataError(f"{self._path}: {key} is not whole")
        return whole


def _load(place: _Place) -> torch.Tensor:
    try:
        content = io.BytesIO(_bytes(place))
        tensor: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # a damaged file raises anything
        raise DataError(f"{place.file}: unreadable ({one_line(error, 200)})") from error
    return tensor


def _bytes(place: _Place) -> bytes:
    try:
        with open_to_read(place.file) as file:
            file.seek(place.offset)
            return file.read(place.length)
    except OSError as error:
        raise DataError(f"{place.file}: {error.strerror}; the checkpoint is not whole") from error
