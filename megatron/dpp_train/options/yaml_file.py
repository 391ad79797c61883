"""``--yaml-cfg``: settings from a file, in Megatron-LM's form or as plain ``flag: value`` lines.

Megatron-LM groups fields under headings such as ``language_model`` and ``model_parallel``;
headings are ignored, the fields count. A key is a destination (``bias_gelu_fusion: false``) or a
flag (``no-bias-gelu-fusion: true``). ``arguments`` puts the result below the command line and
above the defaults.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from typing import Any

from megatron.dpp.errors import ConfigError, one_line
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
    for key, value in _items(read_mapping(path, "--yaml-cfg")):
        flag = key.replace("_", "-")
        if flag in by_flag and key not in by_dest:
            action = by_flag[flag]
            values[action.dest] = _by_flag(path, key, action, value)
        elif key in by_dest:
            values[key] = _typed(path, key, by_dest[key], value)
        else:
            nearest = difflib.get_close_matches(key, [*by_dest, *by_flag], n=1, cutoff=0.5)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise ConfigError(f"--yaml-cfg {path}: unknown setting {key}{hint}")
    return values


def _items(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _items(value)
        else:
            yield str(key).lstrip("-").replace("-", "_"), value


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
