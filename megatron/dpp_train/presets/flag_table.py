"""A table of the training scripts' flags, for checks that cannot wait for Megatron's parser.

Importing that parser takes seconds. The table is made from the installed package once, by set-up or
by the first run, and is kept in ``build/`` of the source tree or in the user's cache directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import DataError

PACKAGE = Path(__file__).resolve().parents[1]
_WITH_FLAGS = ("data.datasets", "hf.layers", "deepspeed")
"""Modules that add flags to Megatron's."""
_KINDS: dict[object, str] = {int: "int", float: "float"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The values that a flag takes.

    Args:
        kind: ``switch``, ``int``, ``float``, or ``str`` for all that is not checked.
        nargs: as of argparse; None for one value.
        choices: texts of the possible values; empty where all are.
        default: what the parser takes without the flag, where it is a plain value.
        dest: name of the parsed value.
    """

    kind: str
    nargs: str | int | None
    choices: Sequence[str]
    default: Any
    dest: str

    def reading(self, name: str) -> dict[str, Any]:
        """Keywords of ``add_argument`` for this flag, whose name tells on from off."""
        if self.kind == "switch":
            is_on = not name.startswith("--no-") or self.dest.startswith("no_")
            return {"action": "store_const", "const": is_on}
        kind = {"int": int, "float": float}.get(self.kind, str)
        choices = [kind(each) for each in self.choices]
        return {"type": kind, "nargs": self.nargs, "choices": choices or None}


Table = dict[str, Flag]
"""Flag with its dashes -> what it takes."""


def of_parser(parser: argparse.ArgumentParser) -> Table:
    """The table of a parser's flags."""
    table: Table = {}
    for action in parser._actions:
        kind = "switch" if action.nargs == 0 else _KINDS.get(action.type, "str")
        names = (getattr(each, "name", each) for each in action.choices or ())
        plain = action.default != "==SUPPRESS==" and isinstance(
            action.default, str | int | float | bool
        )
        flag = Flag(
            kind=kind,
            nargs=action.nargs,
            choices=[str(each) for each in names],
            default=action.default if plain else None,
            dest=action.dest,
        )
        table |= dict.fromkeys(action.option_strings, flag)
    return table


def engine_flags() -> Table:
    """The table of the dynamic pipeline's flags."""
    from megatron.dpp.command_line import add_dpp_flags
    from megatron.dpp.trace.host import HostTrace

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_dpp_flags(parser)
    for switch in ("--use-dpp", "--dpp-strict", "--dpp-trace", "--dpp-trace-only"):
        parser.add_argument(switch, action="store_true")
    for field in dataclasses.fields(HostTrace):
        if field.name != "only":
            parser.add_argument(f"--dpp-trace-{field.name}", type=type(field.default or ""))
    parser.add_argument("--metrics-file")
    return of_parser(parser)


def saved() -> Table | None:
    """The table of the installed Megatron; None where none was made yet."""
    for path in _places():
        with contextlib.suppress(OSError, ValueError, TypeError):
            rows = json.loads(path.read_text(encoding="utf-8"))
            return {name: Flag(**row) for name, row in rows.items()} | engine_flags()
    return None


def table() -> Table:
    """The table, made first where none is kept.

    Raises:
        DataError: Megatron's parser cannot be imported; names what to install.
    """
    found = saved()
    if found is not None:
        return found
    print("reading Megatron's flags, once (10 s)", file=sys.stderr, flush=True)
    made = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    found = saved()
    if made.returncode or found is None:
        last = (made.stderr.strip().splitlines() or ["no place can be written"])[-1]
        raise DataError(
            f"Megatron's flags cannot be read ({last}): run bash tools/setup.sh, or "
            "pip install 'megatron-core[training]==0.19.2'"
        )
    return found


def _places() -> list[Path]:
    """Files that may hold the table, the first that can be written first."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    digest = hashlib.sha256()
    for name in _WITH_FLAGS:
        digest.update(PACKAGE.joinpath(f"{name.replace('.', '/')}.py").read_bytes())
    name = f"flags-megatron-core-{version}-{digest.hexdigest()[:8]}.json"
    own = [ROOT / "build" / name] if (ROOT / "setup.py").is_file() else []
    return [*own, user_cache() / name]


def user_cache() -> Path:
    """The user's directory for what can be made again; it is made where it is missing."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dpp"
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    return home


def main() -> int:
    """Make the table, and keep it at the first place that can be written."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for name in _WITH_FLAGS:
        importlib.import_module(f"megatron.dpp_train.{name}").add_arguments(parser)
    text = json.dumps({name: asdict(flag) for name, flag in of_parser(parser).items()})
    for path in _places():
        scratch = path.with_name(f".{path.name}-{os.getpid()}")
        with contextlib.suppress(OSError):
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(path)
            for old in path.parent.glob("flags-megatron-core-*.json"):
                if old != path:
                    old.unlink()
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
