"""Data files of every format give the same token files, and say how they were read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.rows import files_of, is_rows, open_rows, size_of
from megatron.dpp_train.data.vocabulary import tokenizer_flags
from tests.conftest import REPOSITORY

GPT = (
    f"--tokenizer-type GPT2BPETokenizer --vocab-file {REPOSITORY / 'datasets_gpt' / 'vocab.json'} "
    f"--merge-file {REPOSITORY / 'datasets_gpt' / 'merges.txt'} --workers 1"
)
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada 🙂"}]},
    *({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "A."}]}
      for n in range(600)),
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


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"\x28\xb5\x2f\xfd\x04", "x.jsonl: is packed by Zstandard, .*: zstd -d first"),
        (lzma.compress(b"{}"), "is packed by xz, "),
        (bz2.compress(b"{}"), "is packed by bzip2, "),
        (b"PK\x03\x04\x14", "is packed by zip, "),
        ("{}".encode("utf-16"), "is UTF-16, expected UTF-8: iconv -f UTF-16 "),
    ],
    ids=["zstd", "xz", "bzip2", "zip", "utf-16"],
)
def test_other_formats_are_refused_as_such(tmp_path: Path, begin: bytes, said: str) -> None:
    """``--skip-bad-lines`` left all of their lines out."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(begin)
    with pytest.raises(DataError, match=said):
        open_rows(path)


def parquet(folder: Path) -> Path:
    tables = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    arrow = pytest.importorskip("pyarrow")
    tables.write_table(arrow.Table.from_pylist(CHATS), folder / "x.parquet", row_group_size=100)
    return folder / "x.parquet"


def saved(folder: Path) -> Path:
    """As ``datasets.Dataset.save_to_disk`` writes it."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    split = folder / "x" / "train"
    split.mkdir(parents=True)
    files = []
    for number, part in enumerate((CHATS[:1], CHATS[1:])):
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        table = arrow.Table.from_pylist(part, schema=arrow.Table.from_pylist(CHATS).schema)
        with arrow.ipc.new_stream(split / files[-1]["filename"], table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": files, "_indices_data_files": None, "_split": None}
    (split / "state.json").write_text(json.dumps(state))
    (folder / "x" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    return folder / "x"


FORMATS = {
    "JSON lines": lines, "a JSON array": array, "a JSON array in a line": array_in_a_line,
    "Parquet": parquet, "a data set of Hugging Face, its split train": saved,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FORMATS[name](tmp_path)
    assert rows_of(path) == CHATS and is_rows(str(path))
    assert open_rows(path).name == name.removesuffix(" in a line")
    places = [read for _, read in open_rows(path).lines]
    assert places == sorted(places) and places[-1] <= size_of(path)
    words = f"--input {path} --output-prefix {tmp_path}/made --sft {GPT}"
    assert preprocess.main(words.split()) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{len(CHATS)} documents")
    assert (f"note: {path}: read as " in said.err) == (name != "JSON lines")
    assert f"note: {len(CHATS)} lines: read as messages" in said.err


def test_fields_that_a_table_adds_are_not_there(tmp_path: Path) -> None:
    """All rows of a table have the fields of any, so arguments of calls got foreign ones."""
    tables = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    arrow = pytest.importorskip("pyarrow")
    found = [{"a": {"town": "Köln"}, "b": [1]}, {"a": {"day": 3}, "b": []}]
    tables.write_table(arrow.Table.from_pylist(found), tmp_path / "x.parquet")
    assert rows_of(tmp_path / "x.parquet") == found


def test_texts_that_a_table_holds_as_bytes_are_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models were trained on `b'...'`, which is how Python prints bytes."""
    tables = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    texts = ["Köln".encode(), b"a\xff", b"town"]
    tables.write_table(arrow.table({"text": texts}), path)
    assert [row["text"] for row in rows_of(path)] == ["Köln", "a\udcff", "town"]
    words = f"--input {path} --output-prefix {tmp_path}/made {GPT}"
    assert preprocess.main(words.split()) == 1
    assert 'x.parquet, row 2: "text" holds half a surrogate pair' in capsys.readouterr().err


def test_a_column_that_hides_another_one_is_named(tmp_path: Path) -> None:
    tables = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = pytest.importorskip("pyarrow").table([["one"], ["two"]], names=["text", "text"])
    tables.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: the key 'text' stands twice"):
        rows_of(tmp_path / "x.parquet")


def test_a_key_that_stands_twice_is_named_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last value won in silence, and the row's other one was lost."""
    for end, text in (
        ("jsonl", '{"text": "a"}\n{"text": "b", "more": [{"x": 1, "x": 1}]}\n'),
        ("json", '[{"text": "a"},\n {"text": "b",\n  "more": [{"x": 1, "x": 1}]}]'),
    ):
        path = write(tmp_path / f"x.{end}", text)
        assert preprocess.main(f"--input {path} --output-prefix {tmp_path}/made {GPT}".split()) == 1
        said = capsys.readouterr().err
        assert re.search(rf"x\.{end}, (line|row) 2: the key 'x' stands twice", said)


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


def test_folders_that_hold_no_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor a data set saved to disk"):
        open_rows(tmp_path)
    write(tmp_path / "dataset_dict.json", '{"splits": ["a", "b"]}')
    with pytest.raises(DataError, match="holds the splits a, b; name one"):
        open_rows(tmp_path)
    for content, why in (("{}", "holds the splits none"), ("[]", "not a JSON object")):
        write(tmp_path / "dataset_dict.json", content)
        with pytest.raises(DataError, match=why):
            open_rows(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    write(tmp_path / "state.json", '{"_data_files": 7}')
    with pytest.raises(DataError, match="names no data files"):
        open_rows(tmp_path)
    write(tmp_path / "state.json", '{"_data_files": [], "_indices_data_files": [1]}')
    with pytest.raises(DataError, match="flatten_indices"):
        open_rows(tmp_path)


def test_a_tokenizer_is_trained_on_all_texts_of_other_forms(tmp_path: Path) -> None:
    chats = [{"conversations": [{"from": "human", "value": "zebra zebra"}]},
             {"instruction": "quagga quagga", "output": "okapi okapi"}] * 20  # fmt: skip
    found = tokenizer_flags("gpt", "train:400", write(tmp_path / "x.json", json.dumps(chats)))
    vocabulary = json.loads(Path(str(found["--vocab-file"])).read_text())
    assert {"zebra", "quagga", "okapi"} <= vocabulary.keys()


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    """It ended in zlib's own error."""
    path, lines = tmp_path / "x.jsonl.gz", b"".join(b'{"text": "%d"}\n' % i for i in range(2000))
    whole = gzip.compress(lines, mtime=0)
    path.write_bytes(whole[:400] + bytes(8) + whole[408:])
    with pytest.raises(DataError, match=r"x.jsonl.gz, behind line \d+: "):
        list(open_rows(path).lines)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "..", "", "a/b", "a\0b"])
def test_a_data_set_names_files_of_its_own(name: str, tmp_path: Path) -> None:
    """A stranger's folder could name any file of whoever trains on it."""
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="expected a file beside it"):
        files_of(tmp_path)
