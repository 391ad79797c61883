"""Loads of files that may come from anyone: they build plain data, and run nothing of the file."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, by its base
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron.dpp.core.compat import replaced
from megatron.dpp.errors import DataError, one_line
from megatron.dpp_train.checkpoint.reader import PlainUnpickler, member_of, refusal

_STATE = re.compile(
    r"collections\.OrderedDict|builtins\.(set|bytearray)|_codecs\.encode|_io\.BytesIO"
    r"|torch\.(Size|bool|device|(bfloat|float|uint|int)\d+\w*)"
    r"|torch\._utils\._rebuild_tensor_v2|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.storage\.(UntypedStorage|_load_from_bytes)"
    r"|megatron\.core\.safe_globals\.safe_load_from_bytes"
    r"|numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct)"
    r"|transformer_engine\.common\.recipe\.(_FormatHelper|Format|MMParams|QParams|\w+Scaling)"
    r"|megatron\.core\.extensions\.transformer_engine\.TEDelayedScaling"
)
"""Dotted names in what Transformer Engine keeps of an fp8 layer. The bytes of a tensor come by
``torch.load``, which :func:`only_plain_data` restricts, too."""
_NUMBERS = "?bBhHiIlLqQefd"
"""The types of NumPy's numbers."""


@contextlib.contextmanager
def only_plain_data(source: object) -> Iterator[None]:
    """Around loads by megatron-core, PyTorch, Transformer Engine and NumPy: every ``torch.load``
    has ``weights_only``, and ``pickle.load`` and ``pickle.loads`` are restricted to the classes of
    checkpoints. What a host's program allows by ``torch.serialization.add_safe_globals`` stays
    allowed.

    Args:
        source: named by an error where the file itself is not known.

    Raises:
        DataError: naming the file, and the class or function that it asks for.
    """

    refused: list[DataError] = []

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            try:
                return read(*args, **options)
            except DataError as error:
                refused.append(error)
                raise

        return call

    def load(_: Any, file: Any, **options: Any) -> Any:
        return PlainUnpickler(file, getattr(file, "name", source), **options).load()

    def loads(_: Any, content: Any, **options: Any) -> Any:
        return PlainUnpickler(io.BytesIO(content), source, _STATE, **options).load()

    known = torch.serialization.get_safe_globals()
    with (
        torch.serialization.safe_globals(
            [*(each for each in _numbers() if each not in known), (member_of, "builtins.getattr")]
        ),
        replaced(pickle, "load", noting(load)),
        replaced(pickle, "loads", noting(loads)),
        replaced(torch, "load", noting(partial(_load_tensors, source))),
        replaced(DefaultLoadPlanner, "load_bytes", partial(_load_bytes, source)),
    ):
        try:
            yield
        except (CheckpointException, pickle.UnpicklingError) as error:
            failures = getattr(error, "failures", {})  # by rank, each with its stack
            refused += [each[0] for each in failures.values() if isinstance(each[0], DataError)]
            if not refused and isinstance(error, CheckpointException):
                raise
            text = str(refused[0]) if refused else f"{source}: {one_line(error, 300)}"
            raise DataError(text) from error


def _load_bytes(
    source: object, original: Callable[..., Any], planner: Any, item: Any, value: Any
) -> None:
    """Gives the bytes of an object the name of their file for errors."""
    info = (planner.metadata.storage_data or {}).get(item.storage_index)
    value.name = f"{source}/{getattr(info, 'relative_path', '')} ({item.storage_index.fqn})"
    original(planner, item, value)


def _load_tensors(
    source: object, original: Callable[..., Any], file: Any, *args: Any, **options: Any
) -> Any:
    named = isinstance(file, (str, os.PathLike))
    where = os.fspath(file) if named else getattr(file, "name", source)
    try:
        return original(file, *args, **options | {"weights_only": True})
    except (OSError, torch.OutOfMemoryError, DataError):
        raise
    except Exception as error:  # a broken file raises anything
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found:
            raise refusal(where, found[1]) from error
        raise DataError(f"{where}: unreadable ({one_line(error, 300)})") from error


def _numbers() -> list[Any]:
    """Classes and functions that rebuild NumPy's numbers and arrays, and states of generators."""
    scalar, array = numpy.float64(0).__reduce__()[0], numpy.zeros(0).__reduce__()[0]
    return [
        torch.Generator,
        *(scalar, (scalar, "numpy.core.multiarray.scalar")),  # the names of NumPy 1
        *(array, (array, "numpy.core.multiarray._reconstruct")),
        numpy.ndarray,
        numpy.dtype,
        *{type(numpy.dtype(kind)) for kind in _NUMBERS},
    ]
