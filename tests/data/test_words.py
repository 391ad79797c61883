"""The file of ``--per-split-data-args-path``: what each split may be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.words import data_words


def read(folder: Path, content: Any) -> Any:
    path = folder / "splits.json"
    path.write_text(json.dumps(content))
    args: Any = SimpleNamespace(
        data_args_path=None, data_path=None, per_split_data_args_path=str(path)
    )
    return data_words(args)


def test_each_split_has_words_or_none(tmp_path: Path) -> None:
    content = {"train": [0.5, "a", 0.5, "b"], "valid": "c d", "test": None}
    assert read(tmp_path, content) == (None, [["0.5", "a", "0.5", "b"], ["c", "d"], None])


@pytest.mark.parametrize("content", [{"train": ["a"]}, {"train": 5}, [], {"train": [["a"]]}])
def test_anything_else_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(DataError, match="prefixes of train, valid and test"):
        read(tmp_path, content)
