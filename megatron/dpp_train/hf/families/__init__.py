"""Families of models: what of a Hugging Face model becomes which flag and which tensor.

One description per family; ``known`` has those of this package, and ``--family-file`` names a file
with a further one.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import runpy
from collections.abc import Mapping
from pathlib import Path

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.hf.families import known, parts
from megatron.dpp_train.hf.families.base import Config, Family, Row, Sizes, row

__all__ = ["Config", "Family", "Row", "Sizes", "find_families", "parts", "row"]


@functools.cache
def find_families(file: str | Path | None = None) -> Mapping[str, Family]:
    """Name -> family. One of the file replaces one of the same name here.

    Args:
        file: a Python file with ``FAMILY``, which this runs (``--family-file``).

    Raises:
        DataError: the file holds no family, or raises an error.
    """
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(known.__path__):
        content = vars(importlib.import_module(f"{known.__name__}.{module.name}"))
        found |= {each.name: each for each in content.values() if isinstance(each, Family)}
    if file is not None:
        family = _of_file(Path(file))
        found[family.name] = family
    return found


def _of_file(path: Path) -> Family:
    where = f"--family-file {path}"
    if not path.is_file():
        raise DataError(f"{where}: no such file")
    try:
        content = runpy.run_path(str(path))
    except Exception as error:  # a user's code raises anything
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = trace.tb_lineno if trace is not None else 0
        raise DataError(
            f"{where}: {type(error).__name__} in line {line}: {one_line(error, 300)}"
        ) from error
    found = content.get("FAMILY")
    if not isinstance(found, Family):
        raise DataError(f"{where}: expected FAMILY to be a Family, not {shown(found)}")
    return found
