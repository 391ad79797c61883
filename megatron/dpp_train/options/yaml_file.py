"""``--yaml-cfg``: settings from a file, in Megatron-LM's form or as plain ``flag: value`` lines.

Megatron-LM groups fields under headings such as ``language_model`` and ``model_parallel``;
headings are ignored, the fields count. A key is a destination (``bias_gelu_fusion: false``) or a
flag (``no-bias-gelu-fusion: true``). ``arguments`` puts the result below the command line and
above the defaults.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator
from typing import Any

from megatron.dpp.errors import ConfigError, did_you_mean, one_line
from megatron.dpp_train.text_files import read_mapping


def defaults_from_yaml(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Destination to value, for ``parser.set_defaults``.

    Raises:
        DataError: the file cannot be read or is no YAML mapping.
        ConfigError: a key that is no flag (with the nearest match), or a value of the wrong type.
    """
    by_dest = {action.dest: action for action in parser._actions}
    by_flag = {name.lstrip("-"): action for name, action in parser._option_string_actions.items()}
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for written, value in _items(read_mapping(path, "--yaml-cfg")):
        key, flag = _spellings(written)
        if flag in by_flag and key not in by_dest:
            action = by_flag[flag]
            dest, value = action.dest, _by_flag(path, written, action, value)
        elif key in by_dest:
            dest, value = key, _typed(path, written, by_dest[key], value)
        else:
            hint = did_you_mean(key, [*by_dest, *by_flag])
            raise ConfigError(f"--yaml-cfg {path}: unknown setting {written}{hint}")
        if dest in values and values[dest] != value:
            raise ConfigError(
                f"--yaml-cfg {path}: {names[dest]} and {written} set the same to {values[dest]!r} "
                f"and {value!r}"
            )
        values[dest], names[dest] = value, written
    return values


def with_keys(text: str, path: str, parser: argparse.ArgumentParser, given: Collection[str]) -> str:
    """The text of an error with the file's keys for the flags that it names.

    Args:
        given: destinations that the command line sets, whose values are not the file's.
    """
    by_dest = {action.dest: action for action in parser._actions}
    by_flag = {name.lstrip("-"): action for name, action in parser._option_string_actions.items()}
    written: dict[str, str] = {}
    for each, _ in _items(read_mapping(path, "--yaml-cfg")):
        key, flag = _spellings(each)
        action = by_dest.get(key) or by_flag.get(flag)
        if action is not None and action.dest not in given:
            written[action.dest] = each
    named = [
        f"{flag} is {key}"
        for dest, key in written.items()
        for flag in {*by_dest[dest].option_strings, "--" + dest.replace("_", "-")}
        if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
    ]
    return f"{text} ({', '.join(sorted(named))} in {path})" if named else text


def _spellings(written: str) -> tuple[str, str]:
    """A key as the destination and as the flag that it may stand for."""
    key = written.lstrip("-").replace("-", "_")
    return key, key.replace("_", "-")


def _items(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys as they are written, and their values."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _items(value)
        else:
            yield str(key), value


def _by_flag(path: str, key: str, action: argparse.Action, value: Any) -> Any:
    """The value that the flag would store; a switch set to false leaves its default."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"--yaml-cfg {path}: {key} is a switch, not {value!r}")
        return action.const if value else action.default
    return _typed(path, key, action, value)


def _typed(path: str, key: str, action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0 and isinstance(action.const, bool) and not isinstance(value, bool | None):
        raise ConfigError(f"--yaml-cfg {path}: {key} is a switch, not {value!r}")
    if value is None or action.nargs == 0:
        return value
    kind: Any = action.type or str
    if isinstance(value, bool) and kind is str:
        value = "on" if value else "off"  # YAML reads these words as booleans
    try:
        if action.nargs in ("+", "*") or isinstance(action.nargs, int):
            entries = value if isinstance(value, list) else str(value).split()
            return [kind(str(entry)) for entry in entries]
        converted = kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"--yaml-cfg {path}: {key}: {one_line(error, 200)}") from error
    if action.choices is not None and converted not in action.choices:
        choices = ", ".join(str(choice) for choice in action.choices)
        raise ConfigError(f"--yaml-cfg {path}: {key} {converted}: expected one of {choices}")
    return converted
