"""The rows of gpu_plugin_matrix.py, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import gpu_plugin_matrix as matrix  # noqa: E402

from tests.plugin.hosts import ENGINE, NEWEST, Hosts  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_megatrons_own_parser_reads_the_flags_of_every_row(hosts: Hosts) -> None:
    """Rows whose script the archive lacks say so."""
    found = dict(matrix.parsed(hosts, NEWEST, list(matrix.ROWS), ENGINE))
    assert found.keys() == matrix.ROWS.keys()
    for name, said in found.items():
        assert said in ("read", f"no {matrix.ROWS[name].script} in {NEWEST}"), name
    assert found["sft"] == "read"


def test_the_chats_of_a_row_have_a_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    matrix.write_chats(tmp_path)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (first, *_) = (tmp_path / "chats.jsonl").read_text().splitlines()
    ids = made.apply_chat_template(json.loads(first)["messages"], tokenize=True, return_dict=True)
    words = " ".join(each["content"] for each in json.loads(first)["messages"])
    assert ids["input_ids"] == [*map(int, words.split()), made.eos_token_id]
