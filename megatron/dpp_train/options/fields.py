"""Command line flags made from dataclass fields, with Megatron-LM's naming rules.

A field ``some_name`` becomes ``--some-name``; a boolean that is on by default becomes
``--no-some-name`` (and ``--disable-some-name``). ``flags`` lists what Megatron-LM spells
differently. ``core_flags.json`` beside this file holds the fields of the pinned megatron-core
(``core_fields`` writes it), so that checking a command line imports neither torch nor
megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError

TABLE = Path(__file__).with_name("core_flags.json")
KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
Row = dict[str, Any]
"""A field: ``name``, ``kind`` (a key of KINDS, or ``enum``), ``default``, ``help``, ``choices``,
``nargs``, ``flags`` where the field's metadata spells them out; an enum has its class in ``enum``
and names of members as choices and default. ``unset`` is the value of a flag that is not given,
where that is not the field's default."""


def core_fields() -> dict[str, list[Row]]:
    """Name of a megatron-core dataclass -> the fields that text can express.

    Raises:
        ConfigError: another megatron-core is installed, and its dataclasses cannot be read.
    """
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        installed = table["megatron-core"]  # set-up may still be to come
    if installed != table["megatron-core"]:
        table = _read_installed(installed)
    fields: dict[str, list[Row]] = table["fields"]
    return fields


def _read_installed(version: str) -> dict[str, Any]:
    """The table of another megatron-core; read by a process of its own, since that imports it."""
    command = [sys.executable, "-m", "megatron.dpp_train.options.core_fields", "-"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(
            f"megatron-core {version}: its settings cannot be read "
            f"({(result.stderr.splitlines() or ['no message'])[-1]}); install the pinned version"
        )
    table: dict[str, Any] = json.loads(result.stdout)
    return table


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
        options: dict[str, Any] = {"type": KINDS.get(row["kind"], str)}
        options |= {key: row[key] for key in ("choices", "nargs") if key in row}
        if row["kind"] == "bool":
            options = {"action": "store_false" if default else "store_true"}
            if default:
                names = [f"--no-{names[0][2:]}", f"--disable-{names[0][2:]}"]
        names, default = row.get("flags", names), row.get("unset", default)
        text = row["help"].replace("%", "%%")
        group.add_argument(*names, dest=row["name"], default=default, help=text, **options)


def enum_rows() -> Iterable[Row]:
    """The fields whose values are names of an enumeration's members."""
    rows = itertools.chain.from_iterable(core_fields().values())
    return (row for row in rows if row["kind"] == "enum")
