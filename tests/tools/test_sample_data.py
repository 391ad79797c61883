"""The committed samples are what their generator writes, and their vocabularies cover them."""

from __future__ import annotations

import json
from pathlib import Path

import make_sample_data
import pytest
import tokenizers

from megatron.dpp_train.data.tokenizer import Tokenizer, build

ROOT = Path(__file__).resolve().parents[2]


def gpt(folder: Path) -> tuple[Tokenizer, tokenizers.ByteLevelBPETokenizer]:
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    ours = build("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    return ours, tokenizers.ByteLevelBPETokenizer(*files)


def bert_knows(folder: Path, text: str) -> bool:
    words = str(folder / "vocab.txt")
    made = build("BertWordPieceLowerCase", vocab_file=words)
    return made.special["[UNK]"] not in made.encode(text)


@pytest.mark.parametrize(("model", "count", "seed"), [("gpt", 5000, 1), ("bert", 2500, 2)])
def test_committed_corpus_is_the_generators(model: str, count: int, seed: int) -> None:
    lines = (ROOT / f"datasets_{model}" / "dataset.json").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    assert documents == list(make_sample_data.make_documents(count, seed))
    assert set(documents[0]) == {"src", "text", "type", "id", "title"}


def test_vocabularies_can_be_trained_again(tmp_path: Path) -> None:
    texts = [document["text"] for document in make_sample_data.make_documents(200, seed=3)]
    make_sample_data.train_gpt_vocabulary(texts, tmp_path, 400)
    make_sample_data.train_bert_vocabulary(texts, tmp_path, 400)
    ours, whole = gpt(tmp_path)
    assert ours.eod == ours.vocab_size - 1
    assert whole.decode(ours.encode(texts[0])) == texts[0]
    assert bert_knows(tmp_path, texts[0])


def test_committed_vocabularies_know_every_word_of_their_samples() -> None:
    ours, whole = gpt(ROOT / "datasets_gpt")
    documents = [each["text"] for each in make_sample_data.make_documents(2500, seed=2)]
    assert bert_knows(ROOT / "datasets_bert", "\n".join(documents))
    assert all(whole.decode(ours.encode(text)) == text for text in documents[:200])
