"""A key that stands twice in an object: every reader of JSON that people write refuses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.files import strict_json
from megatron.dpp.schedule.recording import Recording
from megatron.dpp_train.text_files import read_json


def test_objects_are_read_as_json_reads_them() -> None:
    assert strict_json.loads('{"a": [1, {"b": null}], "c": {}}') == {"a": [1, {"b": None}], "c": {}}
    assert strict_json.loads("[7]", parse_int=lambda digits: -int(digits)) == [-7]


def test_a_key_that_stands_twice_is_found_among_many() -> None:
    """The search grew with the square of their number: 200,000 took minutes."""
    text = ", ".join(f'"{number}": 1' for number in range(200_000))
    begin = time.process_time()
    with pytest.raises(strict_json.RepeatedKey, match="key '199999' stands"):
        strict_json.loads(f'{{{text}, "199999": 2}}')
    assert time.process_time() - begin < 30.0


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tape.rank0", lambda path: Recording.load(str(path.with_suffix("")), 0)),
        ("text.json", read_json),
    ],
)
def test_a_key_that_stands_twice_is_named_with_its_file(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    """The last value won in silence."""
    path = tmp_path / name
    path.write_text('{"fixed": 1, "in": {"twice": 1, "twice": 2}}\n')
    with pytest.raises(DataError, match=rf"{name}.*the key 'twice' stands twice"):
        read(path)
