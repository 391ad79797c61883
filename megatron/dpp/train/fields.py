"""Command line flags made from dataclass fields, with Megatron-LM's naming rules.

A field ``some_name`` becomes ``--some-name``; a boolean that is on by default becomes
``--no-some-name`` (and ``--disable-some-name``); text below a field in the class body is its help.
``flags`` lists what Megatron-LM spells differently; fields that no text can express (callables,
groups, dtypes) give no flag. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any


def add_dataclass_flags(
    parser: argparse.ArgumentParser, kind: type, *, skip: Iterable[str] = (), title: str
) -> None:
    """Add a flag for every field of ``kind`` that has none yet.

    Args:
        skip: names of fields that a user cannot set or that ``parser`` spells in another way.
        title: heading of the group in ``--help``.
    """
    known = {action.dest for action in parser._actions}
    group = parser.add_argument_group(title)
    helps = field_helps(kind)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        options = _options(hints[field.name])
        if field.name in known or field.name in set(skip) or not field.init or options is None:
            continue
        names = ["--" + field.name.replace("_", "-")]
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory() if callable(field.default_factory) else None
        if options.get("type") is bool:
            options = {"action": "store_false" if default else "store_true"}
            if default:
                names = [f"--no-{names[0][2:]}", f"--disable-{names[0][2:]}"]
        text = helps.get(field.name, "").replace("%", "%%")
        group.add_argument(*names, dest=field.name, default=default, help=text, **options)


def _options(hint: Any) -> dict[str, Any] | None:
    """``add_argument`` keywords for a type, or None when text cannot express it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        plain = [kind for kind in inner if kind is not type(None)]
        return _options(plain[0]) if len(plain) == 1 else None
    if origin is typing.Literal:
        return {"type": type(inner[0]), "choices": list(inner)}
    if origin is list:
        element = _options(inner[0]) if inner else None
        return element and {**element, "nargs": "+"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": _enum_reader(hint), "metavar": "{" + ",".join(m.name for m in hint) + "}"}
    return {"type": hint} if hint in (bool, int, float, str) else None


def _enum_reader(kind: type[enum.Enum]) -> Any:
    def read(text: str) -> enum.Enum:
        if text not in kind.__members__:
            raise argparse.ArgumentTypeError(
                f"{text}: expected one of {', '.join(kind.__members__)}"
            )
        return kind[text]

    return read


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
