"""Tokenizers give the ids of Megatron's own classes, and name bad files."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data.tokenizer import Tokenizer, build
from megatron.dpp_train.data.vocabulary import tokenizer_flags
from tests.conftest import REPOSITORY
from tests.hf import tiny

VOCAB = str(REPOSITORY / "datasets_gpt" / "vocab.json")
MERGES = str(REPOSITORY / "datasets_gpt" / "merges.txt")
WORDS = str(REPOSITORY / "datasets_bert" / "vocab.txt")
PARTS = [
    "low",
    " low",
    "  ",
    "\n",
    " it's",
    "中",
    "1 x",
    "\u00a0y",
    "a b c ",
    "!",
    "É",
    "<|x|>",
    "ß",
]


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(PARTS, k=draw.randrange(1, 60))) for _ in range(count)]


def of_megatron(**given: Any) -> Any:
    """Megatron's tokenizer."""
    tools = pytest.importorskip("megatron.core.tokenizers.utils.build_tokenizer")
    from megatron.dpp_train.pretrain.mended import local_vocabularies

    names = (
        *("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "special_tokens"),
        *("chat_template", "metadata_path", "tokenizer_hf_no_use_fast", "trust_remote_code"),
        *("pad_vocab_size", "tokenizer_hf_no_include_special_tokens"),
    )
    defaults: dict[str, Any] = dict.fromkeys(names)
    with local_vocabularies():
        return tools.build_tokenizer(argparse.Namespace(**(defaults | given)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"])
def test_ids_are_megatrons(kind: str, tmp_path: Path) -> None:
    tiny.add_tokenizer(tmp_path / "folder", ["Who is Ada? A baker. low it's"] * 3, 300)
    of_kind: dict[str, dict[str, Any]] = {
        "GPT2BPETokenizer": {"vocab_file": VOCAB, "merge_file": MERGES},
        "HuggingFaceTokenizer": {"tokenizer_model": str(tmp_path / "folder")},
        "NullTokenizer": {"vocab_size": 99},
    }
    given = of_kind[kind]
    ours = build(kind, **given)
    theirs = of_megatron(tokenizer_type=kind, **given)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    for text in ["3 5"] if kind == "NullTokenizer" else [*texts(50), "a<|endoftext|>b"]:
        assert ours.encode(text) == list(theirs.tokenize(text)), text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_berts_ids_are_megatrons_without_ends(kind: str) -> None:
    """Megatron's class adds [CLS] and [SEP], which its data set adds again."""
    ours = build(kind, vocab_file=WORDS)
    theirs = of_megatron(
        tokenizer_type=kind, vocab_file=WORDS, tokenizer_hf_no_include_special_tokens=True
    )
    for text in texts(50):
        assert ours.encode(text) == list(theirs.tokenize(text)), text


def test_a_long_text_has_the_tokens_of_its_whole() -> None:
    """A line of 24 MB took 5 GB."""
    tokenizers = pytest.importorskip("tokenizers")
    text = "".join(random.Random(0).choices(PARTS, k=120_000))
    whole = tokenizers.ByteLevelBPETokenizer(VOCAB, MERGES)
    ours = build("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=MERGES)
    assert ours.encode(text) == whole.encode(text).ids
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


class Letters(Tokenizer):
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_chats_special_tokens_are_one_id_and_others_are_text() -> None:
    letters = Letters(9999, None, {"<|b|>": 1})
    ids, marks = letters.encode_chat("a<|b|>c<|d|>e<|b|>", [(6, 7), (13, 18)])
    assert ids == [97, 1, *map(ord, "c<|d|>e"), 1]
    assert marks == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]


def test_wrong_input_is_refused_by_name(tmp_path: Path) -> None:
    def made(kind: str, **given: str) -> Tokenizer:
        return build(kind, **given)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="GPT2BPETokenizer needs --merge-file"):
        made("GPT2BPETokenizer", vocab_file=VOCAB)
    with pytest.raises(ConfigError, match="--vocab-size 0"):
        made("NullTokenizer")
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_text("q z\n")
    (tmp_path / "b.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 5}))
    (tmp_path / "tokenizer.model").write_text("no model")
    wrong: list[tuple[str, dict[str, str], str]] = [
        ("GPT2BPETokenizer", {"vocab_file": "absent", "merge_file": MERGES}, "--vocab-file absent"),
        ("GPT2BPETokenizer", {"vocab_file": f"{tmp_path}/v.json", "merge_file": MERGES},
         "endoftext"),
        ("GPT2BPETokenizer", {"vocab_file": VOCAB, "merge_file": f"{tmp_path}/m.txt"},
         "does not fit"),
        ("BertWordPieceCase", {"vocab_file": f"{tmp_path}/b.txt"}, r"needs \[MASK\]"),
        ("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)}, "no tokenizer"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "some/where"}, "no such file or directory"),
        ("Llama2Tokenizer", {"tokenizer_model": str(tmp_path)}, "no model of SentencePiece"),
    ]  # fmt: skip
    for kind, given, why in wrong:
        with pytest.raises(DataError, match=why):
            made(kind, **given)


def test_a_pipe_among_a_tokenizers_files_is_refused(tmp_path: Path) -> None:
    """Opening it waited for ever, without taking processor time."""
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: no regular file"):
        build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


@pytest.mark.parametrize(
    ("files", "named", "kind"),
    [
        ("tokenizer.json vocab.json merges.txt tokenizer.model", "", "HuggingFaceTokenizer"),
        ("vocab.json merges.txt tokenizer.model", "", None),
        ("tokenizer.model", "", "Llama2Tokenizer"),
        ("tokenizer.json tokenizer.model", "tokenizer.model", "Llama2Tokenizer"),
        ("tokenizer.json vocab.json merges.txt", "vocab.json", None),
        ("tokenizer.json tokenizer_config.json", "tokenizer_config.json", "HuggingFaceTokenizer"),
        ("other.model vocab.json merges.txt", "other.model", "Llama2Tokenizer"),
    ],
)
def test_a_tokenizer_is_told_by_its_files(
    files: str, named: str, kind: str | None, tmp_path: Path
) -> None:
    for name in files.split():
        (tmp_path / name).write_text("{}")
    assert tokenizer_flags("gpt", str(tmp_path / named), None).get("--tokenizer-type") == kind


@pytest.mark.parametrize(
    ("choice", "vocab", "why"),
    [
        ("gpt2", "5", "vocab.json: not a JSON object"),
        ("gpt2", '{"a": 0}', "GPT-2's vocab.json and merges.txt .* are in none of"),
        ("train:256", "", "expected train:N with N from 257 to 1048576"),
        ("train:9999999999", "", "expected train:N with N from 257 to 1048576"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(
    choice: str, vocab: str, why: str, tmp_path: Path
) -> None:
    """Memory for all tokens that were asked for ended the process by SIGABRT."""
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").touch()
    with pytest.raises((ConfigError, DataError), match=why):
        tokenizer_flags("gpt", choice, tmp_path / "x.jsonl")
