"""Loads of files that may come from anyone: they build plain data, and run nothing of the file."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, by its base
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron.dpp.cli.checkpoint_reader import PlainUnpickler, refusal
from megatron.dpp.errors import DataError, one_line
from megatron.dpp.mcore.compat import replaced

_STATE = re.compile(
    r"collections\.OrderedDict|builtins\.(set|bytearray)|_codecs\.encode|_io\.BytesIO"
    r"|torch\.(Size|bool|device|(bfloat|float|uint|int)\d+\w*)"
    r"|torch\._utils\._rebuild_tensor_v2|torch\.storage\._load_from_bytes"
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

    def load(_: Any, file: Any, **options: Any) -> Any:
        return PlainUnpickler(file, getattr(file, "name", source), **options).load()

    def loads(_: Any, content: Any, **options: Any) -> Any:
        return PlainUnpickler(io.BytesIO(content), source, _STATE, **options).load()

    def load_tensors(original: Callable[..., Any], file: Any, *args: Any, **options: Any) -> Any:
        return _load_tensors(original, source, file, *args, **options)

    def load_bytes(original: Callable[..., Any], planner: Any, item: Any, value: Any) -> None:
        info = (planner.metadata.storage_data or {}).get(item.storage_index)
        value.name = f"{source}/{getattr(info, 'relative_path', '')} ({item.storage_index.fqn})"
        original(planner, item, value)

    known = torch.serialization.get_safe_globals()
    with (
        torch.serialization.safe_globals([each for each in _numbers() if each not in known]),
        replaced(pickle, "load", load),
        replaced(pickle, "loads", loads),
        replaced(torch, "load", load_tensors),
        replaced(DefaultLoadPlanner, "load_bytes", load_bytes),
    ):
        try:
            yield
        except (CheckpointException, pickle.UnpicklingError) as error:
            for cause in (error.__cause__, *(each[0] for each in _failures(error))):
                if isinstance(cause, DataError):
                    raise DataError(str(cause)) from error
            raise


def _failures(error: BaseException) -> list[Any]:
    """The failures of ranks that PyTorch's checkpoints gather."""
    return list(getattr(error, "failures", {}).values())


def _load_tensors(
    original: Callable[..., Any], source: object, file: Any, *args: Any, **options: Any
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
    """What NumPy's numbers and arrays are pickled with, such as the states of its generators."""
    return [
        numpy.float64(0).__reduce__()[0],
        numpy.zeros(0).__reduce__()[0],
        numpy.ndarray,
        numpy.dtype,
        *{type(numpy.dtype(kind)) for kind in _NUMBERS},
    ]
