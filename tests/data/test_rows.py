"""Data files of every format give the same token files, and say how they were read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data import rows
from megatron.dpp_train.data.rows import open_rows
from megatron.dpp_train.data.vocabulary import tokenizer_flags
from tests.conftest import REPOSITORY

GPT = (
    f"--tokenizer-type GPT2BPETokenizer --vocab-file {REPOSITORY / 'datasets_gpt' / 'vocab.json'} "
    f"--merge-file {REPOSITORY / 'datasets_gpt' / 'merges.txt'} --workers 1"
)
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada 🙂"}]},
    *({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "A."}]}
      for n in range(300)),
]  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line, _ in open_rows(path).lines]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def lines(folder: Path) -> Path:
    return write(folder / "x.jsonl", "\ufeff" + "".join(json.dumps(each) + "\n" for each in CHATS))


def array(folder: Path) -> Path:
    return write(folder / "x.json", "\ufeff" + json.dumps(CHATS, indent=2) + "\n")


def array_in_a_line(folder: Path) -> Path:
    path = folder / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps(CHATS).encode()))
    return path


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """A download without ``.gz`` in its name was a file of lines that are no UTF-8."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(CHATS[0]).encode()))
    assert rows_of(path) == CHATS[:1]


def parquet(folder: Path) -> Path:
    return table(folder, lambda arrow: arrow.Table.from_pylist(CHATS), row_group_size=100)


def table(folder: Path, make: Callable[[Any], Any], **more: Any) -> Path:
    arrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    arrow.write_table(make(pytest.importorskip("pyarrow")), folder / "x.parquet", **more)
    return folder / "x.parquet"


FORMATS = {
    "JSON lines": lines, "a JSON array": array, "a JSON array in a line": array_in_a_line,
    "Parquet": parquet,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FORMATS[name](tmp_path)
    assert rows_of(path) == CHATS
    places = [read for _, read in open_rows(path).lines]
    assert places == sorted(places) and places[-1] <= path.stat().st_size
    words = f"--input {path} --output-prefix {tmp_path}/made --sft {GPT}"
    assert preprocess.main(words.split()) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{len(CHATS)} documents")
    assert f"note: {len(CHATS)} lines: read as messages" in said.err


def test_fields_that_a_table_adds_are_not_there(tmp_path: Path) -> None:
    """All rows of a table have the fields of any, so arguments of calls got foreign ones."""
    found = [{"a": {"town": "Köln"}, "b": [1]}, {"a": {"day": 3}, "b": []}]
    assert rows_of(table(tmp_path, lambda arrow: arrow.Table.from_pylist(found))) == found


def test_texts_that_a_table_holds_as_bytes_are_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models were trained on `b'...'`, which is how Python prints bytes."""
    texts = ["Köln".encode(), b"a\xff", b"town"]
    path = table(tmp_path, lambda arrow: arrow.table({"text": texts}))
    assert [row["text"] for row in rows_of(path)] == ["Köln", "a\udcff", "town"]
    words = f"--input {path} --output-prefix {tmp_path}/made {GPT}"
    assert preprocess.main(words.split()) == 1
    assert 'x.parquet, row 2: "text" holds half a surrogate pair' in capsys.readouterr().err


def test_a_column_that_hides_another_one_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, lambda arrow: arrow.table([["one"], ["two"]], names=["text", "text"]))
    with pytest.raises(DataError, match=r"x\.parquet: the key 'text' stands twice"):
        rows_of(path)


def test_a_key_that_stands_twice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last value won in silence, and the row's other one was lost."""
    path = write(tmp_path / "x.jsonl", '{"text": "a"}\n{"text": "b", "more": [{"x": 1, "x": 1}]}\n')
    assert preprocess.main(f"--input {path} --output-prefix {tmp_path}/made {GPT}".split()) == 1
    assert "x.jsonl, line 2: the key 'x' stands twice" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"x\.json: the key 'x' stands twice"):
        open_rows(write(tmp_path / "x.json", '[{"text": "a"},\n {"more": [{"x": 1, "x": 1}]}]'))


def test_rows_that_are_bad_are_named_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.json", json.dumps([CHATS[0], 7]))
    words = f"--input {path} --output-prefix {tmp_path}/made --sft {GPT}"
    assert preprocess.main(words.split()) == 1
    assert f"{path}, row 2: expected a JSON object, found int" in capsys.readouterr().err
    broken = write(tmp_path / "y.json", "[\n{},\n{]\n")
    with pytest.raises(DataError, match="begins as a JSON array, but is none"):
        open_rows(broken)


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
        rows_of(write(tmp_path / "x.parquet", "PAR1"))


def test_a_tokenizer_is_trained_on_all_texts_of_other_forms(tmp_path: Path) -> None:
    chats = [{"conversations": [{"from": "human", "value": "zebra zebra"}]},
             {"instruction": "quagga quagga", "output": "okapi okapi"}] * 20  # fmt: skip
    found = tokenizer_flags("gpt", "train:400", write(tmp_path / "x.json", json.dumps(chats)))
    vocabulary = json.loads(Path(str(found["--vocab-file"])).read_text())
    assert {"zebra", "quagga", "okapi"} <= vocabulary.keys()


def test_an_array_that_is_packed_to_burst_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte may unpack to a gigabyte, and an array is read as a whole."""
    monkeypatch.setattr(rows, "_LONGEST_LINE", 1 << 12)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 13) + b"]"))
    with pytest.raises(DataError, match="an array of 4096 bytes or more; write JSON lines"):
        open_rows(path)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    """It ended in zlib's own error."""
    path, lines = tmp_path / "x.jsonl.gz", b"".join(b'{"text": "%d"}\n' % i for i in range(2000))
    whole = gzip.compress(lines, mtime=0)
    path.write_bytes(whole[:400] + bytes(8) + whole[408:])
    with pytest.raises(DataError, match=r"x.jsonl.gz, behind line \d+: "):
        list(open_rows(path).lines)
