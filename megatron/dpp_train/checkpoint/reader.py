"""Reads the pickles inside a checkpoint without running what they name. Nothing here imports
PyTorch; a :class:`PlainUnpickler` loads the classes that it allows.
"""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

from megatron.dpp.budget import budget
from megatron.dpp.errors import DataError, shown
from megatron.dpp.safe_files import open_to_read, read_bytes

_SECONDS, _MEMORY_BYTES = 60.0, 1 << 32
"""Bounds of one pickle: a damaged one may ask for a memo of 32 GiB."""
MOST_PICKLE_BYTES = 1 << 30
"""Bound of the pickle in an archive, which holds no tensors; a compressed one may unpack to more
than there is."""

METADATA = re.compile(
    r"collections\.OrderedDict|builtins\.(set|frozenset)"
    r"|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path"
    r"|torch\.(Size|bool|(bfloat|float|uint|int|complex)\d+\w*)"
    r"|torch\.serialization\._get_layout"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.(TensorProperties|MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.metadata\."
    r"(\w+StorageMetadata|Metadata|MetadataIndex|StorageMeta|TensorProperties|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.planner\."
    r"(SavePlan|WriteItem|WriteItemType|TensorWriteData|BytesIOWriteData)"
    r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|_StoragePrefix)"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.(MCoreMetadata|MCoreSavePlan)"
)
"""Dotted names of the classes that occur in ``.metadata``. None of them runs anything that it is
given."""

ARCHIVE = re.compile(
    r"(torch|numpy|megatron\.core|transformer_engine)\..+|transformer_engine_torch\.DType"
    r"|argparse\.Namespace|types\.SimpleNamespace|collections\.(OrderedDict|Counter)"
    r"|builtins\.(set|bytearray|complex|getattr)|_codecs\.encode|_io\.BytesIO|signal\.Signals"
    r"|pathlib\.(_local\.)?PosixPath"
)
"""Dotted names that may occur in a ``torch.save`` file. ``torch.load`` with ``weights_only``, as
ranks call it, allows a part of these; what it alone refuses is refused when it loads the file."""


def refusal(where: object, name: str) -> DataError:
    """The error about a file that names a class or function that no checkpoint needs."""
    return DataError(
        f"{where}: asks for {name}, which is not run: checkpoints and indices hold tensors, "
        "numbers and plain settings; save it anew without that object, with the program that wrote "
        "it"
    )


class _Guarded(pickle.Unpickler):
    """Refuses a pickle that sets attributes of classes: they are the whole process's."""

    def __init__(self, file: Any, where: object, known: re.Pattern[str], **options: Any) -> None:
        super().__init__(file, **options)
        self._where, self._known = where, known
        self._before: dict[type, dict[str, Any]] = {}

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            for kind, before in self._before.items():
                _restore(kind, before, self._where)

    def _noted(self, found: Any) -> Any:
        """``found``, with the attributes that it has if it is a class."""
        if isinstance(found, type) and found not in self._before:
            self._before[found] = dict(vars(found))
        return found


def _restore(kind: type, before: dict[str, Any], where: object) -> None:
    """Give a class its attributes back, and refuse the file that has changed them."""
    now = dict(vars(kind))
    names = {*now, *before} - {"__slotnames__"}  # which copying an object sets
    changed = [n for n in names if now.get(n, _Anything) is not before.get(n, _Anything)]
    for name in changed:
        if name in before:
            type.__setattr__(kind, name, before[name])
        else:
            type.__delattr__(kind, name)
    if changed:
        raise refusal(where, f"a change of {kind.__module__}.{kind.__qualname__}")


class PlainUnpickler(_Guarded):
    """Loads plain data and known classes.

    Args:
        where: the file's name for errors.
        known: matches the dotted names of these classes.

    Raises:
        DataError: the pickle names anything else, whose module is not imported.
    """

    def __init__(
        self, file: Any, where: object, known: re.Pattern[str] = METADATA, **options: Any
    ) -> None:
        super().__init__(file, where, known, **options)

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return self._member
        _check_name(module, name, self._where, self._known)
        return self._noted(super().find_class(module, name))

    def _member(self, kind: Any, name: str = "") -> enum.Enum:
        return member_of(kind, name, where=self._where)


_GETATTR = ("builtins", "getattr")
"""What Python 3.11.0 to 3.11.3 write for a member of an enumeration, and nothing else may."""


def member_of(kind: Any, name: str, *, where: object = "checkpoint") -> enum.Enum:
    """A member of an enumeration by its name; anything else is refused."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise refusal(where, ".".join(_GETATTR))
    if not (isinstance(name, str) and name in kind.__members__):
        raise refusal(where, f"{shown(name)} of {kind.__module__}.{kind.__qualname__}")
    return kind[name]


def _check_name(module: str, name: str, where: object, known: re.Pattern[str]) -> None:
    if not known.fullmatch(f"{module}.{name}"):
        raise refusal(where, f"{module}.{name}")


def load_plain(path: Path) -> Any:
    """The content of a pickle such as ``.metadata``, whose classes are imported.

    Raises:
        DataError: as :class:`PlainUnpickler`; a broken file raises anything.
    """
    with open_to_read(path) as file, budget(_SECONDS, _MEMORY_BYTES):
        return PlainUnpickler(file, path).load()


class _Anything:
    """Stands for an object of any other class, and keeps its attributes."""

    def __init__(self, *values: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Sets what pickle would set of an object without this method, from either form."""
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                vars(self).update(part)


class _Reader(_Guarded):
    """Builds plain data and namespaces only, and imports nothing. A name outside of ``known`` is
    refused, as by who loads the file later.
    """

    def __init__(self, content: bytes, where: Path, known: re.Pattern[str]) -> None:
        super().__init__(io.BytesIO(content), where, known)

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return self._member
        _check_name(module, name, self._where, self._known)
        known = {"Namespace": argparse.Namespace, "OrderedDict": collections.OrderedDict}
        return self._noted(known.get(name, _Anything))

    def persistent_load(self, pid: object) -> None:
        return None

    def _member(self, kind: object, name: str = "") -> _Anything:
        if kind is not _Anything:
            raise refusal(self._where, ".".join(_GETATTR))
        return _Anything()


def read_pickle(path: Path) -> Any:
    """The content of a pickle such as ``.metadata``, by stand-ins for its classes.

    Raises:
        DataError: as :class:`PlainUnpickler`; a broken file raises anything.
    """
    content = read_bytes(path)
    with budget(_SECONDS, _MEMORY_BYTES):
        return _Reader(content, path, METADATA).load()


def read_archive(path: Path) -> Any:
    """The content of a ``torch.save`` file, without tensors.

    Raises:
        DataError: as :class:`PlainUnpickler`; a broken file raises anything.
    """
    with open_to_read(path) as file, zipfile.ZipFile(file) as archive:
        found = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise DataError(f"{path}: holds {len(found)} files data.pkl, expected one")
        if found[0].file_size > MOST_PICKLE_BYTES:
            raise DataError(
                f"{path}: {found[0].filename} has {found[0].file_size} bytes, "
                f"{MOST_PICKLE_BYTES} at most are read"
            )
        with budget(_SECONDS, _MEMORY_BYTES):
            return _Reader(archive.read(found[0]), path, ARCHIVE).load()
