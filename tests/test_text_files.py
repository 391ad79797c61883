"""Files that are broken or hostile: one error that names the file, at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.text_files import parse_json, read_json, read_mapping, read_text

_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 200 + "]" * 200, "nested more than 64 deep"),
        ('{"a":' * 100_000, "nested more than 64 deep"),
        ("1" * 400, "a number of 400 digits"),
        ("[" + "1" * 5000 + "]", "a number of 5000 digits"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"a": [{"key": 1, "key": 1}]}', "the key 'key' stands twice in an object"),
    ],
)
def test_json_of_any_form_is_a_value_or_one_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"^--flag {path}: .*{said}"):
        read_json(path, "--flag")


def test_a_tokenizer_without_a_longest_text_is_read() -> None:
    """transformers writes ``int(1e30)`` for it, which was refused as a number of 31 digits."""
    assert parse_json(json.dumps({"model_max_length": int(1e30)}), "it")


def test_json_that_people_have_is_read() -> None:
    value: Any = {"deep": [[[[{"x": [1.5, -3, 2**63]}]]]], "text": "\u0000", "none": None}
    assert parse_json(json.dumps(value), "it") == value
    assert parse_json("[" * 64 + "]" * 64, "it")
    assert parse_json(b"17", "it") == 17


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_BOMB, "has more than 10000 entries"),
        ("a: &a [*a]\n", "has more than 10000 entries"),
        ("a: " + "[" * 5000, "nested more than 64 deep"),
        ("a: " + "{b: " * 5000, "nested more than 64 deep"),
        ("day: 2024-13-45\n", "not YAML"),
        ("lr: " + "1" * 5000 + "\n", "not YAML"),
        ("lr: 1" + ":1" * 5000 + "\n", "not YAML|."),
        ("? [a, b]\n: c\n", "not YAML|."),
        ("x: !!python/object/apply:os.system [true]\n", "not YAML"),
        ("x: *missing\n", "not YAML"),
        ("- a\n", "expected a mapping"),
        (
            "a:\n  lr: 1\n  b: 2\n  lr: 1\n",
            "the key 'lr' stands twice in a mapping, in lines 2 and 4",
        ),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  x: 2\n", "not YAML|."),
        ("a: b\n" * 300_000, "has more than 1048576 bytes"),
    ],
)
def test_yaml_of_any_form_is_a_mapping_or_one_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    try:
        assert isinstance(read_mapping(path, "--yaml-cfg"), dict) and "|." in said
    except DataError as error:
        assert str(error).startswith(f"--yaml-cfg {path}: ")
        if "|." not in said:
            assert said in str(error)


def test_a_mark_in_front_of_a_text_is_none_of_it(tmp_path: Path) -> None:
    """Editors on Windows write one. A prompt began with it, and a JSON file was refused."""
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert (read_text(path), read_json(path)) == ('{"a": 1}\n', {"a": 1})
    assert read_text(path, marked=True)[0] == "\ufeff"


@pytest.mark.parametrize(
    ("written", "read"), [("010", 8), ("-010", -8), ("1:30", 90), ("0x10", 16), ("1:30.5", 90.5)]
)
def test_numbers_to_another_base_are_refused(written: str, read: float, tmp_path: Path) -> None:
    """They were taken as YAML reads them: a split of 98:1:1 was the number 352861."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"a: 1\nseed: {written}\n")
    with pytest.raises(DataError, match=f"line 2: YAML reads {written} as {read}; write that"):
        read_mapping(path)
    path.write_text(f"seed: '{written}'\n")
    assert read_mapping(path) == {"seed": written}


def test_numbers_print_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("a: 1.10\nb: 1_000\nc: -0.5\nd: .inf\ne: 0\nf: +7\n")
    found = read_mapping(path)
    assert found == {"a": 1.1, "b": 1000, "c": -0.5, "d": math.inf, "e": 0, "f": 7}
    assert list(map(str, found.values())) == ["1.10", "1_000", "-0.5", "inf", "0", "+7"]


def test_aliases_in_settings_stay(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("base: &base\n  lr: 1\nmodel:\n  <<: *base\n  layers: 2\n")
    assert read_mapping(path)["model"] == {"lr": 1, "layers": 2}


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "missing"])
def test_a_name_that_no_file_has_is_one_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_text(tmp_path / name, "--flag")
