"""The committed samples are what their generator writes, and their vocabularies cover them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import make_sample_data
import pytest
from megatron.dpp_train.tokenizers import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("model", "count", "seed"), [("gpt", 5000, 1), ("bert", 2500, 2)])
def test_committed_corpus_is_the_generators(model: str, count: int, seed: int) -> None:
    lines = (ROOT / f"datasets_{model}" / "dataset.json").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    assert documents == list(make_sample_data.make_documents(count, seed))
    assert set(documents[0]) == {"src", "text", "type", "id", "title"}


def test_sums_in_the_text_are_right() -> None:
    for document in make_sample_data.make_documents(300, seed=7):
        numbers = re.findall(r"(has|gives|buys) (\d+)", document["text"])
        if not document["title"].startswith("shopping"):
            continue
        (_, first), *rest = numbers
        held = int(first)
        for verb, number in rest:
            if verb == "has":
                assert held == int(number), document["text"]
            else:
                held += int(number) if verb == "buys" else -int(number)


def test_vocabularies_can_be_trained_again(tmp_path: Path) -> None:
    texts = [document["text"] for document in make_sample_data.make_documents(200, seed=3)]
    make_sample_data.train_gpt_vocabulary(texts, tmp_path, 400)
    make_sample_data.train_bert_vocabulary(texts, tmp_path, 400)
    gpt = build_tokenizer(
        "GPT2BPETokenizer", str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    )
    assert gpt.eod == gpt.vocab_size - 1
    assert gpt.detokenize(gpt.tokenize(texts[0])) == texts[0]
    bert = build_tokenizer("BertWordPieceLowerCase", str(tmp_path / "vocab.txt"))
    assert bert.vocab["[UNK]"] not in bert.tokenize(texts[0])


def test_committed_vocabularies_know_every_word_of_their_samples() -> None:
    gpt = build_tokenizer(
        "GPT2BPETokenizer",
        str(ROOT / "datasets_gpt" / "vocab.json"),
        str(ROOT / "datasets_gpt" / "merges.txt"),
    )
    bert = build_tokenizer("BertWordPieceLowerCase", str(ROOT / "datasets_bert" / "vocab.txt"))
    for number, document in enumerate(make_sample_data.make_documents(2500, seed=2)):
        assert bert.vocab["[UNK]"] not in bert.tokenize(document["text"])
        if number < 200:
            assert gpt.detokenize(gpt.tokenize(document["text"])) == document["text"]
