"""Tokenizers: Megatron-LM's ids, special tokens and paddings, and clear errors for bad files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.tokenizers import Tokenizer, build_tokenizer, padded_vocab_size

ROOT = Path(__file__).resolve().parents[2]
BERT_WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "un",
    "##aff",
    "##able",
    "cafe",
    "!",
    "中",
    "λογος",
    "##s",
]


@pytest.fixture
def bpe_files(tmp_path: Path) -> tuple[str, str]:
    vocab = {"l": 0, "o": 1, "w": 2, "Ġ": 3, "lo": 4, "low": 5, "Ġlow": 6, "<|endoftext|>": 7}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w\nĠ low\n", encoding="utf-8")
    return str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")


@pytest.fixture
def bert_file(tmp_path: Path) -> str:
    (tmp_path / "vocab.txt").write_text("\n".join(BERT_WORDS) + "\n", encoding="utf-8")
    return str(tmp_path / "vocab.txt")


def test_gpt2_merges_in_order_and_returns_the_text(bpe_files: tuple[str, str]) -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", *bpe_files)
    assert tokenizer.tokenize("low low") == [5, 6]
    assert tokenizer.detokenize([5, 6]) == "low low"
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 7)
    with pytest.raises(NotImplementedError):
        _ = tokenizer.pad


def test_a_long_text_has_the_tokens_of_its_whole() -> None:
    """A line of 24 MB took 5 GB, and no signal ended its work."""
    folder = ROOT / "datasets_gpt"
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    parts = [
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
        "<|endoftext|>",
    ]
    text = "".join(random.Random(0).choices(parts, k=300_000))
    whole = tokenizers.ByteLevelBPETokenizer(*files)  # the package's own class for these files
    assert build_tokenizer("GPT2BPETokenizer", *files).tokenize(text) == whole.encode(text).ids


def test_bert_cleans_splits_and_folds_like_the_reference(bert_file: str) -> None:
    tokenizer = build_tokenizer("BertWordPieceLowerCase", bert_file)
    text = "Unaff\u200dable\u00a0CAF\u00c9! x\u4e2d\u0000 \u039b\u039f\u0393\u039f\u03a3 "
    text += "a" * 201
    names = [tokenizer.inv_vocab[i] for i in tokenizer.tokenize(text)]
    assert names == ["un", "##aff", "##able", "cafe", "!", "[UNK]", "中", "λογος", "[UNK]"]


def test_bert_adds_its_special_tokens_behind_the_file(bert_file: str) -> None:
    tokenizer = build_tokenizer("BertWordPieceLowerCase", bert_file, vocab_extra_ids=2)
    last = len(BERT_WORDS)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (last, last + 1, last + 1)
    assert tokenizer.vocab_size == last + 4
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert list(tokenizer.inv_vocab) == list(range(last + 4))


class Letters(Tokenizer):
    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_chats_special_tokens_are_one_id_and_others_are_text() -> None:
    letters = Letters({}, {})
    ids = letters.tokenize_part("a<|b|>c<|d|>e<|b|>", {"<|b|>": 1})
    assert ids == [97, 1, *map(ord, "c<|d|>e"), 1]


def test_null_tokenizer_counts_an_end_of_document() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=99)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize("3 5") == [3, 5]


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "padded"),
    [(50257, 1, 50304), (50257, 2, 50432), (30524, 1, 30592), (30524, 2, 30720)],
)
def test_padding_is_megatrons(size: int, tensor_parallel: int, padded: int) -> None:
    assert padded_vocab_size(size, 128, tensor_parallel) == padded


def test_wrong_input_is_refused_by_name(tmp_path: Path, bpe_files: tuple[str, str]) -> None:
    vocab, merges = bpe_files
    with pytest.raises(ConfigError, match="--merge-file"):
        build_tokenizer("GPT2BPETokenizer", vocab)
    with pytest.raises(ConfigError, match="GPT2BPETokenizer, Bert"):
        build_tokenizer("NoSuchTokenizer")
    with pytest.raises(DataError, match=r"--vocab-file .*absent"):
        build_tokenizer("GPT2BPETokenizer", str(tmp_path / "absent"), merges)
    with pytest.raises(DataError, match="endoftext"):
        (tmp_path / "v.json").write_text('{"a": 0}', encoding="utf-8")
        build_tokenizer("GPT2BPETokenizer", str(tmp_path / "v.json"), merges)
    with pytest.raises(DataError, match="merge 1"):
        (tmp_path / "m.txt").write_text("lo\n", encoding="utf-8")
        build_tokenizer("GPT2BPETokenizer", vocab, str(tmp_path / "m.txt"))
    with pytest.raises(DataError, match="does not fit"):
        (tmp_path / "m.txt").write_text("q z\n", encoding="utf-8")
        build_tokenizer("GPT2BPETokenizer", vocab, str(tmp_path / "m.txt"))
    with pytest.raises(DataError, match=r"\[MASK\]"):
        (tmp_path / "b.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n", encoding="utf-8")
        build_tokenizer("BertWordPieceLowerCase", str(tmp_path / "b.txt"))
