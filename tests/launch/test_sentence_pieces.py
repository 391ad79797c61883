"""``tokenizer.model`` of SentencePiece, as Llama 2 and Mistral have it: ids, chats and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.launch.start import prepare
from megatron.dpp_train.tokenizers import PIECES, build_tokenizer

TEXTS = [
    "It is 1234567 and\n\n  the  year 2024.",
    "a chat \u00fc in the old town",
    "the year, the town",
]
CHAT = [
    {"role": "user", "content": "the year?"},
    {"role": "assistant", "content": "It is 2024."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "the old town"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral's, whose brackets are pieces."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of byte pairs with the options of Llama 2."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / PIECES).open("wb") as file:
        trainer.train(
            sentence_iterator=iter(TEXTS * 4),
            model_writer=file,
            model_type="bpe",
            vocab_size=330,
            byte_fallback=True,
            pad_id=-1,
            control_symbols=["[INST]", "[/INST]"],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=3,
        )
    return folder


def configure(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_ids_are_those_of_the_package(folder: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_file=str(folder / PIECES))
    for kind, begin in (("Llama2Tokenizer", (1,)), ("GPTSentencePieceTokenizer", ())):
        ours = build_tokenizer(kind, tokenizer_model=str(folder))
        assert (ours.vocab_size, ours.eod, ours.begin) == (330, 2, begin)
        for text in TEXTS:
            assert ours.tokenize(text) == reference.encode(text)
            assert ours.detokenize(ours.tokenize(text)) == text
    assert ours.detokenize([1, *reference.encode("the year"), 2]) == "<s>the year</s>"
    assert ours.detokenize([*reference.encode("the year"), 340]) == "the year"  # a row of padding
    configure(folder, add_bos_token=False)
    assert build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder)).begin == ()


def test_ids_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    configure(
        folder, tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True, eos_token="</s>"
    )
    ours = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))
    reference = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert [*ours.begin, *ours.tokenize(text)] == reference(text)["input_ids"]


def test_a_chat_has_tokens_of_its_template(folder: Path) -> None:
    """Words behind a token have no space but that of the template; added tokens are one each."""
    configure(folder, added_tokens_decoder={"330": {"content": "<|end|>"}}, eos_token="<|end|>")
    ours = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))
    assert (ours.eod, ours.vocab_size) == (330, 331)
    (sample,), _ = ChatEncoder(ours, {"default": TEMPLATE}).encode({"messages": CHAT})
    ids, marks = sample.ids, sample.marks
    text = ours.detokenize(ids)
    assert text.count("<|end|>") == 2
    special = ours.special_tokens()
    assert ids.count(special["[INST]"]) == ids.count(special["[/INST]"]) == 2
    answers = [index for index, mark in zip(ids, marks, strict=True) if mark]
    plain = [each for each in answers if each != 330]
    assert plain == ours.tokenize("It is 2024.") + ours.tokenize("the old town")


def test_tokens_of_older_files_stand_behind_the_pieces(folder: Path) -> None:
    """``added_tokens.json`` and ``special_tokens_map.json``, and lists of special tokens."""
    configure(folder, additional_special_tokens=["<|user|>", "[INST]"])
    (folder / "added_tokens.json").write_text('{"<|end|>": 330}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    ours = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))
    assert (ours.eod, ours.vocab_size) == (330, 332)
    ids = ours.tokenize_part("<|user|>the year<|end|>", ours.special_tokens())
    assert (ids[0], ids[-1]) == (331, 330)
    assert ours.detokenize(ids) == "<|user|>the year<|end|>"
    configure(folder, added_tokens_decoder=[1])
    with pytest.raises(DataError, match=r"config\.json: its added tokens cannot be read"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))


def test_ids_behind_the_pieces_may_have_gaps(folder: Path) -> None:
    configure(folder, added_tokens_decoder={"340": {"content": "<|end|>"}}, eos_token="<|end|>")
    ours = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))
    assert (ours.eod, ours.vocab_size) == (340, 341)
    assert ours.detokenize([340, 335, 340]) == "<|end|><|end|>"


def test_documents_of_train_begin_and_end_with_their_tokens(folder: Path) -> None:
    source = folder.parent / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = prepare("gpt", str(source), {}, tokenizer=str(folder))
    assert data.flags["--tokenizer-type"] == "Llama2Tokenizer"
    assert data.flags["--tokenizer-model"] == str(folder / PIECES)
    assert data.preparation is not None
    assert preprocess.main([*data.preparation[1:], "--workers", "1"]) == 0
    tokens = numpy.fromfile(f"{data.flags['--data-path']}.bin", dtype=numpy.uint16).tolist()
    ours = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(folder))
    assert tokens == [index for text in TEXTS for index in (1, *ours.tokenize(text), 2)]


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(DataError, match=r"tokenizer\.model: No such file"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=str(tmp_path))
    (tmp_path / PIECES).write_bytes(b"nothing")
    with pytest.raises(DataError, match="no model of SentencePiece"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(ConfigError, match="Llama2Tokenizer needs --tokenizer-model"):
        build_tokenizer("Llama2Tokenizer")


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / PIECES).touch()
    with pytest.raises(
        DataError, match=r"needs SentencePiece .*; pip install sentencepiece"
    ) as error:
        build_tokenizer("Llama2Tokenizer", tokenizer_model=str(tmp_path))
    assert "\n" not in str(error.value)
