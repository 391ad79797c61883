"""The token files that ``train`` takes or makes, and their tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.launch.flags import ROOT, Flags
from megatron.dpp_train.launch.start import data_notes, describe_tokens, prepare
from tests.options.test_sequences import index

BERT_VOCAB = {"--vocab-file": str(ROOT / "datasets_bert" / "vocab.txt")}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """One line of JSON."""
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n")
    return path


def made_with(arch: str, text: Path, flags: Flags) -> list[str]:
    """The words behind ``--tokenizer-type`` in the command that makes the token files."""
    command = prepare(arch, str(text), flags).preparation or []
    return command[command.index("--tokenizer-type") + 1 :]


def test_text_is_tokenised_with_the_tokenizer_of_the_run(text: Path) -> None:
    """``--tokenizer-type`` reaches both the preprocessing and the run."""
    cased = {**BERT_VOCAB, "--tokenizer-type": "BertWordPieceCase"}
    assert made_with("bert", text, cased)[0] == "BertWordPieceCase"
    null = {"--tokenizer-type": "NullTokenizer", "--vocab-size": "99"}
    assert made_with("gpt", text, null)[:3] == ["NullTokenizer", "--vocab-size", "99"]
    assert made_with("gpt", text, {})[0] == "GPT2BPETokenizer"
    assert "--vocab-size" not in made_with("gpt", text, {"--vocab-size": "99"})


def test_token_files_without_a_place_are_refused_with_both_folders(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone and a working directory of another user: a permission of a partial file was told."""
    monkeypatch.setattr("os.access", lambda *_: False)  # as root, who may write everywhere
    with pytest.raises(DataError, match=r"neither .* nor .* can be written: start in another dir"):
        prepare("gpt", str(text), {})


def test_a_file_of_megatrons_own_names_the_tokenizer_of_its_text(
    text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "megatron.yaml"
    path.write_text("tokenizer_type: NullTokenizer\nvocab_size: 99\n")
    words = made_with("gpt", text, {"--yaml-cfg": str(path)})
    assert words[:3] == ["NullTokenizer", "--vocab-size", "99"]


def test_each_tokenizer_has_token_files_of_its_own(text: Path) -> None:
    given = [
        {**BERT_VOCAB},
        {**BERT_VOCAB, "--tokenizer-type": "BertWordPieceCase"},
        {"--tokenizer-type": "NullTokenizer", "--vocab-size": "99"},
        {"--tokenizer-type": "NullTokenizer", "--vocab-size": "98"},
    ]
    paths = {prepare("bert", str(text), flags).flags["--data-path"] for flags in given}
    assert len(paths) == len(given)


def test_the_default_tokenizers_token_files_keep_their_name(text: Path) -> None:
    """The launch scripts use the same name: a hash of the text and the vocabulary's files."""
    for path in (str(text), None):
        source = text if path else ROOT / "datasets_bert" / "dataset.json"
        parts = source.read_bytes() + Path(BERT_VOCAB["--vocab-file"]).read_bytes()
        stem = f"{'mine' if path else 'sample'}-{hashlib.sha256(parts).hexdigest()[:12]}"
        for more in ({}, {"--tokenizer-type": "BertWordPieceLowerCase"}):
            found = prepare("bert", path, {**BERT_VOCAB, **more}).flags["--data-path"]
            assert Path(found).name == f"{stem}_text_sentence"


def test_a_changed_encoding_of_chats_has_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    old = prepare("gpt", str(chats), {"--sft": True}).flags["--data-path"]
    monkeypatch.setattr("megatron.dpp_train.launch.start.CHAT_ENCODING", 0)
    assert prepare("gpt", str(chats), {"--sft": True}).flags["--data-path"] != old


def test_chats_are_preprocessed_with_their_template(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    plain = prepare("gpt", str(chats), {"--sft": True})
    asked = {"--sft": True, "--sft-tokenizer-prompt-format": str(template)}
    own = prepare("gpt", str(chats), asked)
    assert plain.preparation and "--append-eod" not in plain.preparation
    assert plain.flags["--data-path"].endswith("_chat_document")
    assert str(template) in (own.preparation or [])
    template.write_text("{{ messages }}\n")
    other = prepare("gpt", str(chats), asked)
    assert len({each.flags["--data-path"] for each in (plain, own, other)}) == 3


def test_a_note_compares_documents_with_the_longest(tmp_path: Path) -> None:
    index(tmp_path / "x_chat_document")
    flags = {"--sft": True, "--data-path": str(tmp_path / "x_chat_document"), "--seq-length": 100}
    (line,) = data_notes(flags)
    assert "sequences of 100 tokens; these have 38 on average" in line and "38%" in line
    (line,) = data_notes({**flags, "--seq-length": 20})
    assert "sequences of 20 tokens; these have 13 on average" in line and "65%" in line
    assert data_notes({"--data-path": "x", "--seq-length": 100}) == []


@pytest.mark.parametrize(("size", "count"), [(65498, 8), (65499, 4)])
def test_tokens_of_a_large_vocabulary_have_four_bytes(
    size: int, count: int, tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(16))
    flags = {"--data-path": str(tmp_path / "x"), "--vocab-size": size}
    told = describe_tokens({**flags, "--tokenizer-type": "NullTokenizer"})
    assert f": {count} tokens, 0 of them unknown; vocabulary of {size + 1}" in told
