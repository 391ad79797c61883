"""Command line flags made from dataclass fields, with Megatron-LM's naming rules.

A field ``some_name`` becomes ``--some-name``; a boolean that is on by default becomes
``--no-some-name`` (and ``--disable-some-name``); text below a field in the class body is its help.
``flags`` lists what Megatron-LM spells differently; fields that no text can express (callables,
groups, dtypes) give no flag.

The fields of the pinned megatron-core lie beside this file in ``core_flags.json``, so that a
command line is checked without the seconds that importing PyTorch takes. With another megatron-core
the dataclasses themselves are read. ``python -m megatron.dpp.cli.fields`` writes the file.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_name("core_flags.json")
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_DATACLASSES = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.optimizer", "OptimizerConfig"),
    ("megatron.core.distributed", "DistributedDataParallelConfig"),
    ("megatron.core.datasets.gpt_dataset", "GPTDatasetConfig"),
    ("megatron.core.datasets.bert_dataset", "BERTMaskedWordPieceDatasetConfig"),
)

Row = dict[str, Any]
"""A field: ``name``, ``kind`` (a key of _KINDS, or ``enum``), ``default``, ``help``, ``choices``,
``nargs``, ``flags`` where the field's metadata spells them out; an enum has its class in ``enum``
and names of members as choices and default. ``unset`` is the value of a flag that is not given,
where that is not the field's default."""


def core_fields() -> dict[str, list[Row]]:
    """Name of a megatron-core dataclass to the fields that text can express."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        installed = table["megatron-core"]  # set-up may still be to come
    if installed != table["megatron-core"]:
        return read_dataclasses()
    fields: dict[str, list[Row]] = table["fields"]
    return fields


def read_dataclasses() -> dict[str, list[Row]]:
    """What :func:`core_fields` gives, from the dataclasses of the megatron-core at hand."""
    fields = {}
    for module, name in _DATACLASSES:
        kind = getattr(importlib.import_module(module), name)
        fields[name] = _rows(kind)
    return fields


def _rows(kind: type) -> list[Row]:
    helps, hints = field_helps(kind), typing.get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        options = _options(hints[field.name])
        if not field.init or options is None:
            continue
        default = field.default
        if default is dataclasses.MISSING:
            factory = field.default_factory
            default = None if factory is dataclasses.MISSING else factory()
        if isinstance(default, enum.Enum):
            default = default.name
        spelt = field.metadata.get("argparse_meta", {})  # megatron-core's own way to say so
        row = {"name": field.name, "default": default, "help": helps.get(field.name, ""), **options}
        row |= {"flags": spelt["arg_names"]} if "arg_names" in spelt else {}
        row |= {"unset": spelt["default"]} if "default" in spelt else {}
        rows.append(row)
    return rows


def _options(hint: Any) -> Row | None:
    """``kind``, ``choices`` and ``nargs`` for a type, or None when text cannot express it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        plain = [kind for kind in inner if kind is not type(None)]
        return _options(plain[0]) if len(plain) == 1 else None
    if origin is typing.Literal:
        return {"kind": type(inner[0]).__name__, "choices": list(inner)}
    if origin is list:
        element = _options(inner[0]) if inner else None
        return element and {**element, "nargs": "+"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        place = f"{hint.__module__}:{hint.__qualname__}"
        return {"kind": "enum", "enum": place, "choices": list(hint.__members__)}
    return {"kind": hint.__name__} if hint in _KINDS.values() else None


def add_flags(
    parser: argparse.ArgumentParser, rows: Iterable[Row], *, skip: Iterable[str] = (), title: str
) -> None:
    """Add a flag for every field that has none yet.

    Args:
        skip: names of fields that a user cannot set or that ``parser`` spells in another way.
        title: heading of the group in ``--help``.
    """
    known = {action.dest for action in parser._actions}
    group = parser.add_argument_group(title)
    for row in rows:
        if row["name"] in known or row["name"] in set(skip):
            continue
        names, default = [f"--{row['name'].replace('_', '-')}"], row["default"]
        options: dict[str, Any] = {"type": _KINDS.get(row["kind"], str)}
        options |= {key: row[key] for key in ("choices", "nargs") if key in row}
        if row["kind"] == "bool":
            options = {"action": "store_false" if default else "store_true"}
            if default:
                names = [f"--no-{names[0][2:]}", f"--disable-{names[0][2:]}"]
        names, default = row.get("flags", names), row.get("unset", default)
        text = row["help"].replace("%", "%%")
        group.add_argument(*names, dest=row["name"], default=default, help=text, **options)


def enum_members(args: argparse.Namespace) -> None:
    """Put megatron-core's enumeration members where ``args`` holds their names, in place."""
    for row in itertools.chain.from_iterable(core_fields().values()):
        value = getattr(args, row["name"], None)
        if row["kind"] == "enum" and isinstance(value, str):
            module, name = row["enum"].split(":")
            setattr(args, row["name"], getattr(importlib.import_module(module), name)[value])


def field_helps(kind: type) -> dict[str, str]:
    """The string below each field in the source of a dataclass and its bases, on one line."""
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for field, text in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                helps[field.target.id] = " ".join(text.value.value.split())
    return helps


if __name__ == "__main__":
    version = importlib.metadata.version("megatron-core")
    table = {"megatron-core": version, "fields": read_dataclasses()}
    _TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
