"""Files that are broken or hostile: one error that names the file, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.text_files import parse_json, read_json, read_text


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


def test_a_mark_in_front_of_a_text_is_none_of_it(tmp_path: Path) -> None:
    """Editors on Windows write one. A prompt began with it, and a JSON file was refused."""
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert (read_text(path), read_json(path)) == ('{"a": 1}\n', {"a": 1})
    assert read_text(path, marked=True)[0] == "\ufeff"


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "missing"])
def test_a_name_that_no_file_has_is_one_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_text(tmp_path / name, "--flag")
