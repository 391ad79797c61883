"""Reads the pickles inside a checkpoint without PyTorch, and without running what they name."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any


class _Anything:
    """Stands for an object of any other class, and keeps its attributes."""

    def __init__(self, *values: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class _Reader(pickle.Unpickler):
    """Builds plain data and namespaces only."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"Namespace": argparse.Namespace, "OrderedDict": collections.OrderedDict}
        return known.get(name, _Anything)

    def persistent_load(self, pid: object) -> None:
        return None


def read_pickle(path: Path) -> Any:
    """The content of a pickle, such as ``.metadata``. Raises anything on a broken file."""
    return _Reader(io.BytesIO(path.read_bytes())).load()


def read_archive(path: Path) -> Any:
    """The content of a ``torch.save`` file, without tensors. Raises anything on a broken file."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
        return _Reader(io.BytesIO(archive.read(name))).load()
