"""Reads the fields of megatron-core's dataclasses that text can express.

``python -m megatron.dpp_train.options.core_fields`` writes them to ``core_flags.json`` beside it;
with ``-`` it prints them. Fields of other types (callables, groups, dtypes) give no flag.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import itertools
import json
import sys
import textwrap
import types
import typing
from typing import Any

from megatron.dpp_train.options.fields import KINDS, TABLE, Row

_DATACLASSES = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.optimizer", "OptimizerConfig"),
    ("megatron.core.distributed", "DistributedDataParallelConfig"),
    ("megatron.core.datasets.gpt_dataset", "GPTDatasetConfig"),
    ("megatron.core.datasets.bert_dataset", "BERTMaskedWordPieceDatasetConfig"),
)


def read_dataclasses() -> dict[str, list[Row]]:
    """The table of ``fields.core_fields``, from the installed megatron-core."""
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
    return {"kind": hint.__name__} if hint in KINDS.values() else None


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


def main() -> None:
    """Write or print the table."""
    version = importlib.metadata.version("megatron-core")
    text = json.dumps({"megatron-core": version, "fields": read_dataclasses()}, indent=1) + "\n"
    if "-" in sys.argv[1:]:
        print(text, end="")
    else:
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
