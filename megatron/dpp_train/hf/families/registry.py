"""Finds families: those of this package, of installed packages, and of a file that a user names."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.hf.families import known
from megatron.dpp_train.hf.families.base import Family

ENTRY_POINTS = "megatron_dpp.families"
"""Group of entry points by which an installed package adds families. Each names a module with
``FAMILY``, or a :class:`Family`."""
FLAG = "--family-file"
_SAID = 300
"""Characters of an error of a file that are quoted."""


@functools.cache
def find_families(file: str | Path | None = None) -> Mapping[str, Family]:
    """Name -> family. One of a package replaces one of the same name here, and one of the file
    both.

    Args:
        file: a Python file with ``FAMILY``, which this runs (``--family-file``).

    Raises:
        DataError: the file or a package holds no family, or raises an error.
    """
    found = {}
    for module in pkgutil.iter_modules(known.__path__):
        family = importlib.import_module(f"{known.__name__}.{module.name}").FAMILY
        found[family.name] = family
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        family = _of_package(point)
        found[family.name] = family
    if file is not None:
        family = _of_file(Path(file))
        found[family.name] = family
    return found


def _of_package(point: importlib.metadata.EntryPoint) -> Family:
    where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
    try:
        content = point.load()
    except Exception as error:  # another program's code raises anything
        raise DataError(f"{where}: {type(error).__name__}: {one_line(error, _SAID)}") from error
    return _checked(getattr(content, "FAMILY", content), where)


def _of_file(path: Path) -> Family:
    where = f"{FLAG} {path}"
    if not path.is_file():
        raise DataError(f"{where}: no such file")
    spec = importlib.util.spec_from_file_location(f"_family_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError(f"{where}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code raises anything
        line = _line_of(error, path)
        raise DataError(
            f"{where}: {type(error).__name__} in line {line}: {one_line(error, _SAID)}"
        ) from error
    return _checked(_family_of(module), where)


def _family_of(module: ModuleType) -> Any:
    return getattr(module, "FAMILY", None)


def _line_of(error: Exception, path: Path) -> int:
    """The last line of the file that the error passed; 0 without one."""
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _checked(found: Any, where: str) -> Family:
    if not isinstance(found, Family):
        raise DataError(f"{where}: expected FAMILY to be a Family, not {shown(found)}")
    return found
