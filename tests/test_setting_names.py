"""Texts of the engine name settings by field: no flag stands in them, and each field exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.command_line import in_flags
from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, Setting
from megatron.dpp.trace.host import HostTrace
from tests.sources import ROOT, tree_of

ROOMS = (
    *("schedule", "transport", "runtime", "core", "sim", "inject.py", "config.py", "hosts.py"),
    *("plugin.py", "errors.py", "trace"),
)
OF_OTHERS = {"--inplace", "--no-deps", "--force-reinstall"}
"""Flags of pip and setup.py, in commands that a text gives whole."""

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def engine_files() -> Iterator[Path]:
    package = ROOT / "megatron" / "dpp"
    for room in ROOMS:
        path = package / room
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def flags_in(text: str) -> list[str]:
    return [flag for flag in FLAG.findall(text) if flag not in OF_OTHERS]


@pytest.mark.parametrize("room", ROOMS)
def test_no_text_of_the_engine_names_a_flag(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {flag}"
        for path in engine_files()
        if path.is_relative_to(ROOT / "megatron" / "dpp" / room)
        for node in ast.walk(tree_of(str(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for flag in flags_in(node.value)
    ]
    assert not wrong, "name the field: errors.setting"


def test_no_text_of_the_extension_names_a_flag() -> None:
    files = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cc", ".h")]
    wrong = [
        f"{path.relative_to(ROOT)}: {flag}"
        for path in files
        for text in re.findall(r'"[^"\n]*"', path.read_text(encoding="utf-8"))
        for flag in flags_in(text)
    ]
    assert files and not wrong, "name the field: setting() of base/error.h"


def test_the_settings_that_texts_name_exist() -> None:
    """In Python, whose calls of ``setting`` name fields, and in C++."""
    fields = {
        "DppConfig": {field.name for field in dataclasses.fields(DppConfig)},
        "HostTrace": {field.name for field in dataclasses.fields(HostTrace)},
        "install": {"strict"},
    }
    named = [
        (str(path.relative_to(ROOT)), _owner(node), node.args[0].value)
        for path in engine_files()
        for node in ast.walk(tree_of(str(path)))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "setting"
        and isinstance(node.args[0], ast.Constant)
    ]
    named += [
        (str(path.relative_to(ROOT)), "DppConfig", name)
        for path in (ROOT / "csrc").rglob("*.cc")
        for name in re.findall(r'\bsetting\("(\w+)"', path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 60
    assert not [each for each in named if each[2] not in fields[each[1]]]


def _owner(call: ast.Call) -> str:
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    return given.get("owner", "DppConfig")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (Setting("DppConfig", "task_rng", False), "--no-dpp-task-rng"),
        (Setting("DppConfig", "node_ips", "1.2.3.4"), "--node-ips 1.2.3.4"),
        (Setting("HostTrace", "interval", 0), "--dpp-trace-interval 0"),
        (Setting("install", "strict", True), "--dpp-strict"),
    ],
)
def test_flags_are_those_of_the_command_lines(given: Setting, flag: str) -> None:
    assert in_flags(given) == flag
    assert f"{given.name}={given.value!r}" in str(given)


def test_every_field_of_the_settings_has_a_flag_that_is_parsed() -> None:
    from megatron.dpp.command_line import Parser, add_dpp_flags, dpp_config

    parser = Parser(add_help=False)
    add_dpp_flags(parser)
    for field in dataclasses.fields(DppConfig):
        value = getattr(DppConfig(), field.name)
        words = in_flags(Setting("DppConfig", field.name, "8.8.8.8" if value is None else value))
        name, *rest = words.split()
        dpp_config(parser.parse_args([" ".join([name, *rest]).replace(" ", "=", 1)]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "x"}, r"DppConfig\(policy='x'\): expected one of auto, .* as module:function"),
        ({"policy": None}, r"DppConfig\(policy=None\): expected one of auto, "),
        ({"slots": 0}, r"DppConfig\(slots=0\): must be from 1 to 1048576"),
        ({"timeout": float("nan")}, r"DppConfig\(timeout=nan\): must be from 0.001 to 2000000.0"),
        ({"slots": 10**5000},
         r"DppConfig\(slots='a number of 16610 bits'\): must be from 1 to 1048576"),
        ({"record": "./x", "replay": "x"},
         r"replay='x'\): DppConfig\(record='./x'\) is the same file"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DppConfig(**settings)
