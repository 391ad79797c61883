"""Finds families: those of this package, of installed packages, and of a file that a user names."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.hf.families import known
from megatron.dpp_train.hf.families.base import Family

ENTRY_POINTS = "megatron_dpp.families"
"""Group of entry points by which an installed package adds families. Each names a module with
``FAMILY``, or a :class:`Family`."""
FLAG = "--family-file"


@functools.cache
def find_families(file: str | Path | None = None) -> Mapping[str, Family]:
    """Name -> family. One of a package replaces one of the same name here, and one of the file
    both.

    Args:
        file: a Python file with ``FAMILY``, which this runs (``--family-file``).

    Raises:
        DataError: the file or a package holds no family, or raises an error.
    """
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(known.__path__):
        content = vars(importlib.import_module(f"{known.__name__}.{module.name}"))
        found |= {each.name: each for each in content.values() if isinstance(each, Family)}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
        family = _family(point.load, where)
        found[family.name] = family
    if file is not None:
        if not Path(file).is_file():
            raise DataError(f"{FLAG} {file}: no such file")
        family = _family(lambda: runpy.run_path(str(file)).get("FAMILY"), f"{FLAG} {file}")
        found[family.name] = family
    return found


def _family(load: Any, where: str) -> Family:
    """What ``load`` gives, or the ``FAMILY`` of it."""
    try:
        content = load()
    except Exception as error:  # another program's code raises anything
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        at = f" in line {line.tb_lineno}" if line is not None else ""
        raise DataError(f"{where}: {type(error).__name__}{at}: {one_line(error, 300)}") from error
    found = getattr(content, "FAMILY", content)
    if not isinstance(found, Family):
        raise DataError(f"{where}: expected FAMILY to be a Family, not {shown(found)}")
    return found
