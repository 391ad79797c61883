"""megatron-dpp preprocess: the bytes that it writes, and the errors for bad input."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.dpp.files.locks import scratch_directory
from megatron.dpp_train.data import child
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.tokenizer import build

ROOT = Path(__file__).resolve().parents[2]
VOCAB = ROOT / "datasets_gpt" / "vocab.json"
MERGES = ROOT / "datasets_gpt" / "merges.txt"
GPT = ["--tokenizer-type", "GPT2BPETokenizer", "--workers", "1"]
GPT += ["--vocab-file", str(VOCAB), "--merge-file", str(MERGES)]
# What Megatron-LM core_v0.16.1 writes for the reference corpus with GPT-2's vocabulary.
BIN_SHA256 = "2041b4c5d48baeff24196db11a108758522200194672a47edf991eb514644c6a"
IDX_SHA256 = "054f7b9cf0ec0ea29bc535b102775c6c513db164ec1bc4769324841abd2ec80a"


def corpus(folder: Path, *lines: str | dict[str, object] | bytes) -> Path:
    path = folder / "corpus.jsonl"
    with path.open("wb") as file:
        for line in lines:
            text = line if isinstance(line, (str, bytes)) else json.dumps(line)
            file.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
    return path


def run(source: Path | str, prefix: Path, *flags: str) -> int:
    arguments = ["--input", str(source), "--output-prefix", str(prefix), *flags]
    return preprocess.main(arguments)


def documents_of(prefix: Path) -> list[list[list[int]]]:
    """Documents of sentences of ids."""
    data = IndexedDataset(str(prefix))
    ends = data.document_indices.tolist()
    return [
        [data[i].tolist() for i in range(start, end)] for start, end in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_output_is_that_of_megatron_lm(reference: Path, tmp_path: Path, workers: str) -> None:
    vocab = reference / "vocab"
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", workers]
    flags += ["--vocab-file", str(vocab / "gpt2-vocab.json")]
    flags += ["--merge-file", str(vocab / "gpt2-merges.txt")]
    start = run if workers == "1" else run_script
    assert start(reference / "corpus.jsonl", tmp_path / "out", *flags) == 0
    assert [sha256(tmp_path / f"out_text_document.{end}") for end in ("bin", "idx")] == [
        BIN_SHA256,
        IDX_SHA256,
    ]


def run_script(source: Path, prefix: Path, *flags: str) -> int:
    """As a user does; worker processes are best started from a main module of their own."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source)]
    command += ["--output-prefix", str(prefix), *flags]
    return subprocess.run(command, timeout=120).returncode


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_documents_of_all_keys_come_in_order_and_empty_ones_stay(tmp_path: Path) -> None:
    source = corpus(tmp_path, *({"text": text, "title": "x"} for text in ("one", "", "two")))
    always_on = ["--keep-sequential-samples", "--legacy-tokenizer", "--partitions", "2"]
    flags = [*GPT, "--append-eod", *always_on, "--json-keys", "text", "title"]
    assert run(source, tmp_path / "out", *flags) == 0
    tokenizer = build("GPT2BPETokenizer", vocab_file=str(VOCAB), merge_file=str(MERGES))
    one, two, title = ([[*tokenizer.encode(t), tokenizer.eod]] for t in ("one", "two", "x"))
    assert documents_of(tmp_path / "out_text_document") == [one, [], two]
    assert documents_of(tmp_path / "out_title_document") == [title] * 3


def test_gzip_and_glob_give_what_the_plain_file_gives(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(300)]
    plain = corpus(tmp_path, *lines)
    for name, part in (("a.json.gz", lines[:200]), ("b.json.gz", lines[200:])):
        (tmp_path / name).write_bytes(gzip.compress("\n".join(part).encode()))
    assert run(plain, tmp_path / "plain", *GPT) == 0
    assert run(tmp_path / "*.json.gz", tmp_path / "packed", *GPT) == 0
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"plain_text_document.{suffix}").read_bytes() == (
            tmp_path / f"packed_text_document.{suffix}"
        ).read_bytes()


BAD_LINES: dict[str, Any] = {
    "not JSON": '{"text": "unfinished',
    "not UTF-8": b'{"text": "\xff"}',
    "empty line": "",
    "expected a JSON object": "[1, 2]",
    'no key "text"': {"title": "no text"},
    "neither a text nor a list": {"text": 5},
    "the key 'text' stands twice in an object": '{"text": "one", "text": "two"}',
    "half a surrogate pair": '{"text": "\\ud800"}',
    "BOM": b'\xef\xbb\xbf{"text": "a mark that a first line alone may have"}',
}


def test_bad_lines_are_named_or_skipped_and_leave_no_new_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"text": "good"}] * 300  # more than are read at a time
    source = corpus(tmp_path, *good, *BAD_LINES.values(), *good)
    assert run(source, tmp_path / "out", *GPT) == 1
    assert f"{source}, line 301: not JSON" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["corpus.jsonl"]
    assert run(source, tmp_path / "out", *GPT, "--skip-bad-lines") == 0
    said = capsys.readouterr()
    assert f"{len(BAD_LINES)} bad lines skipped" in said.out
    shown = [line for line in said.err.splitlines() if "skipped: " in line]
    for (number, reason), line in zip(enumerate(BAD_LINES, 301), shown, strict=True):
        assert f"{source}, line {number}: " in line and reason in line
    assert run(source, tmp_path / "out", *GPT) == 1  # the earlier output stays
    assert len(documents_of(tmp_path / "out_text_document")) == 600


def test_an_index_never_stands_beside_data_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, index = corpus(tmp_path, {"text": "good"}), tmp_path / "out_text_document.idx"
    assert run(source, tmp_path / "out", *GPT) == 0 and index.exists()

    def fails(source: Path, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    assert run(source, tmp_path / "out", *GPT) == 1 and not index.exists()


@pytest.mark.parametrize(
    ("token", "vocab_size"),
    [(70000, 100), (-1, 100), (1 << 31, 100), (-(1 << 40), 100), (1 << 31, 1 << 40)],
)
def test_a_token_outside_the_vocabulary_is_a_bad_line(
    token: int, vocab_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a token above 32 bits."""
    source = corpus(tmp_path, {"text": "1 2"}, {"text": f"1 2 {token}"})
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    flags += ["--workers", "1"]
    assert run(source, tmp_path / "out", *flags) == 1
    bad = f"{source}, line 2: token {token} is outside a vocabulary of "
    assert bad in capsys.readouterr().err
    assert run(source, tmp_path / "out", *flags, "--skip-bad-lines") == 0
    assert documents_of(tmp_path / "out_text_document") == [[[1, 2]]]


WRONG_ARGUMENTS = [
    (1, "no such file", ["--input", "missing.jsonl"]),
    (1, "--input .: a folder; name the files", ["--input", "."]),
    (1, "--vocab-file missing.json", ["--vocab-file", "missing.json"]),
    (2, "needs --merge-file", ["--merge-file", ""]),
    (2, "--workers 0", ["--workers", "0"]),
    (2, "must be 1 to 4096", ["--workers", "9" * 20]),
    (2, "--output-prefix is empty", ["--output-prefix", ""]),
    (2, "named twice", ["--json-keys", "text", "text"]),
]
"""Exit status: 2 of what is no matter of files."""


@pytest.mark.parametrize(("status", "message", "words"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_errors(
    tmp_path: Path, status: int, message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus(tmp_path, {"text": "good"})
    assert run(source, tmp_path / "out", *GPT, *words) == status
    assert message in capsys.readouterr().err


def test_a_corpus_without_a_token_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus(tmp_path, {"text": ""}), tmp_path / "out", *GPT) == 1
    assert "not one token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_killed_run_leaves_no_process_and_no_partial_folder_for_long(
    number: signal.Signals, tmp_path: Path
) -> None:
    source = tmp_path / "long.jsonl"
    source.write_text(json.dumps({"text": "nothing is left " * 400}) + "\n")
    source.write_bytes(source.read_bytes() * 4_000)
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *GPT]
    command = [sys.executable, "-m", "megatron.dpp", "preprocess", *words, "--workers", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        children: list[psutil.Process] = []
        while len(children) < 4 or not [*tmp_path.glob(".*partial*/*.bin")]:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
    finally:
        process.kill()
        process.wait()
    assert not alive
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert len(list(tmp_path.glob(".*partial*"))) == (0 if number == signal.SIGTERM else 1)
    assert run(corpus(tmp_path, {"text": "good"}), tmp_path / "out", *GPT) == 0
    assert not list(tmp_path.glob(".*partial*"))


def test_a_partial_folder_of_a_living_run_stays(tmp_path: Path) -> None:
    with scratch_directory(tmp_path, ".out_text_document.partial-") as scratch:
        assert run(corpus(tmp_path, {"text": "good"}), tmp_path / "out", *GPT) == 0
        assert scratch.is_dir()
    assert not scratch.exists()


def test_bert_sentences_by_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = ROOT / "datasets_bert" / "vocab.txt"
    source = corpus(tmp_path, {"text": "Dr. Ada sat down. She slept."}, {"text": ""})
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab)]
    assert run(source, tmp_path / "whole", *flags, "--workers", "1") == 0
    assert "BERT's data needs --split-sentences" in capsys.readouterr().err
    flags += ["--split-sentences", "--sentence-splitter", "rules", "--workers", "1"]
    assert run(source, tmp_path / "out", *flags) == 0
    assert "needs --split-sentences" not in capsys.readouterr().err
    first, empty = documents_of(tmp_path / "out_text_sentence")
    assert len(first) == 2
    assert empty == []


HANGS = (
    "{% if 'bad' in messages[0].content | string %}{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(45) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
    "{{ BAD }}{% endif %}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
"""A template one of whose chats asks for too much, by the expression in place of BAD."""
BAD = {
    "ns.a == ns.b": "too much processor time",
    "ns.a in [ns.b]": "too much processor time",
    "[ns.a, ns.b] | sort": "too much processor time",
    "'x' * 10 ** 11": "MemoryError|too much memory",
    "raise_exception('no')": "refuses it: no",
    "'\\ud800'": "half a surrogate pair",
}


def template(folder: Path, text: str) -> list[str]:
    (folder / "t.jinja").write_text(text)
    return ["--sft", "--sft-tokenizer-prompt-format", str(folder / "t.jinja")]


def chat(text: str) -> dict[str, object]:
    roles = (("user", text), ("assistant", "Ada."))
    return {"messages": [{"role": role, "content": each} for role, each in roles]}


@pytest.mark.parametrize(
    "bad",
    [pytest.param(bad, marks=[pytest.mark.slow] * ("[" in bad)) for bad in BAD],
)
def test_a_chat_with_which_a_template_takes_too_much_is_a_bad_line(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Python signal ends a call into C."""
    monkeypatch.setattr(preprocess, "LINE_SECONDS", 1.0)
    source = corpus(tmp_path, chat("a"), chat("bad"), chat("b"))
    flags = [*GPT, *template(tmp_path, HANGS.replace("BAD", bad)), "--skip-bad-lines"]
    assert run(source, tmp_path / "out", *flags) == 0
    assert re.search(f"skipped: {source}, line 2: .*{BAD[bad]}", capsys.readouterr().err)
    assert len(documents_of(tmp_path / "out_chat_document")) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for %}", "the chat template is not valid"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template"),
        (HANGS.replace("'bad' in messages[0].content | string", "1").replace("BAD", "ns.a == ns.b"),
         "cannot be read: it takes too much processor time"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_ends_the_run_in_one_line(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(child, "BEGIN_SECONDS", 5.0)
    monkeypatch.setattr(preprocess, "LINE_SECONDS", 1.0)
    source = corpus(tmp_path, chat("a"))
    assert run(source, tmp_path / "out", *GPT, *template(tmp_path, text)) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1 and why in said[0] and len(said[0]) < 600


def broken(folder: Path, **changes: Any) -> list[str]:
    """Flags of a tokenizer.json with some of its parts replaced."""
    made = tokenizers.ByteLevelBPETokenizer(str(VOCAB), str(MERGES))
    content = json.loads(made.to_str())
    for name, value in changes.items():
        content[name] = value if name != "model" else content[name] | value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--workers", "1"]
    return [*kind, "--tokenizer-model", str(folder)]


def splits(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HOSTILE = {
    "a slow regular expression": {"pre_tokenizer": splits("(a+a+)+b")},
    "an unknown token that is missing": {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "[X]"}
    },
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}] * 4}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "growth")) for name in HOSTILE],
)
def test_a_line_at_which_a_tokenizer_fails_is_a_bad_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors of Rust came out raw, in up to 153 lines."""
    monkeypatch.setattr(preprocess, "LINE_SECONDS", 1.0)
    source = corpus(tmp_path, {"text": ""}, {"text": "a" * 40_000}, {"text": ""}, {"text": "\n"})
    flags = broken(tmp_path, **HOSTILE[name])
    assert run(source, tmp_path / "out", *flags) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line and "%|" not in line]
    assert len(said) == 1 and f"error: {source}, line 2: " in said[0] and len(said[0]) < 600
