"""``tokenizer.json`` with a splitting rule of its own: ids, token files, chats and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train import tokenizers
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.launch.main import main
from megatron.dpp_train.launch.start import prepare
from megatron.dpp_train.preflight import check as preflight
from megatron.dpp_train.tokenizers import HuggingFaceTokenizer
from megatron.dpp_train.tokenizers.template_files import find_templates
from tests.hf import tiny

TEXTS = ["It's 1234567 and\n\n  the  year 2024, isn't IT?", "a chat \u00fc <|end|> b" * 3]
CHAT = [
    {"role": "user", "content": "Year?"},
    {"role": "assistant", "content": " 1234567"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "the year"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.add_tokenizer(tmp_path / "model", TEXTS, 300)
    return tmp_path / "model"


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def test_ids_are_those_of_transformers(folder: Path) -> None:
    """Numbers are cut after three digits, which GPT-2's rule does not do."""
    ours, reference = HuggingFaceTokenizer(str(folder)), theirs(folder)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"]
        assert [*ours.begin, *ids] == reference(text)["input_ids"]
        assert ours.detokenize(ids) == text
    assert not any(len(token) > 3 for token in ours.vocab if token.isdigit())
    assert (ours.bos, ours.eos, ours.eod, ours.vocab_size) == (0, 1, 1, len(reference))
    with pytest.raises(NotImplementedError):
        _ = ours.pad


_NEW = {"content": "<|new|>", "lstrip": True, "normalized": False, "special": False}


@pytest.mark.parametrize(
    ("added", "files"),
    [
        ({"added_tokens_decoder": {"300": _NEW}}, {}),
        ({"additional_special_tokens": ["<|new|>", "<|end|>"], "pad_token": "[PAD]"}, {}),
        ({"extra_special_tokens": {"new_token": "<|new|>"}}, {}),
        ({"pad_token": "year"}, {"added_tokens.json": {"<|new|>": 300}}),
        ({"eos_token": "<|end|>"}, {"special_tokens_map.json": {"eos_token": "<|start|>"}}),
    ],
)
def test_tokens_that_other_files_add_are_one_id(
    added: dict[str, Any], files: dict[str, Any], folder: Path
) -> None:
    """As in transformers, which adds those that the file's vocabulary lacks behind it."""
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | added))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    ours, reference = HuggingFaceTokenizer(str(folder)), theirs(folder)
    text = "the year <|new|> of <|end|> and <|start|>[PAD]"
    assert ours.tokenize(text) == reference.encode(text, add_special_tokens=False)
    assert (ours.eos, ours.vocab_size) == (reference.eos_token_id, len(reference))


def test_padding_alone_adds_no_token(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    before = HuggingFaceTokenizer(str(folder)).vocab_size
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "[PAD]"}))
    assert HuggingFaceTokenizer(str(folder)).vocab_size == before
    for wrong in ({"added_tokens_decoder": [1]}, {"extra_special_tokens": 3}):
        config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
        with pytest.raises(DataError, match=r"config\.json: its added tokens cannot be read"):
            HuggingFaceTokenizer(str(folder))


def test_ids_may_have_gaps_and_documents_begin_only_as_the_file_says(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=lambda token: int(vocab[token]))
    vocab[last] += 20
    file.write_text(json.dumps(content))
    ours = HuggingFaceTokenizer(str(folder))
    assert ours.vocab_size == vocab[last] + 1 == len(ours.vocab) + 20
    assert ours.begin == (ours.bos,)
    file.write_text(json.dumps(content | {"post_processor": None}))
    plain = HuggingFaceTokenizer(str(folder))
    assert (plain.begin, plain.bos) == ((), 0)


def test_a_chat_has_the_ids_of_its_template_in_transformers(folder: Path) -> None:
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), find_templates("auto", str(folder)))
    (sample,), _ = encoder.encode({"messages": CHAT})
    ids, marks = sample.ids, sample.marks
    reference = theirs(folder)
    text = reference.apply_chat_template(CHAT, tokenize=False)
    assert reference.decode(ids) == text
    answers = [i for i, mark in zip(ids, marks, strict=True) if mark]
    assert reference.decode(answers) == " 1234567<|end|>the year<|end|>"
    assert ids.count(1) == 4 and ids[0] == 0


def test_documents_begin_and_end_with_the_tokens_of_the_file(folder: Path) -> None:
    source = folder.parent / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = prepare("gpt", str(source), {}, tokenizer=str(folder))
    assert data.flags["--tokenizer-model"] == str(folder / "tokenizer.json")
    assert data.preparation is not None
    assert preprocess.main([*data.preparation[1:], "--workers", "1"]) == 0
    tokens = numpy.fromfile(f"{data.flags['--data-path']}.bin", dtype=numpy.uint16).tolist()
    wanted = [[*theirs(folder)(text)["input_ids"], 1] for text in TEXTS]
    assert tokens == wanted[0] + wanted[1]
    assert prepare("gpt", str(source), {}, tokenizer=str(folder)).preparation is None
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|end|>"', '"eos_token": "a"'))
    assert prepare("gpt", str(source), {}, tokenizer=str(folder)).preparation is not None


def test_token_files_are_those_of_how_a_tokenizer_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "extra_special_tokens": ["<|more|>"]}))
    source = folder.parent / "text.jsonl"
    source.write_text('{"text": "a"}\n')
    with_them = prepare("gpt", str(source), {}, tokenizer=str(folder)).flags["--data-path"]
    assert prepare("gpt", str(source), {}, tokenizer=str(folder)).flags["--data-path"] == with_them
    monkeypatch.setattr(tokenizers, "tokens_to_add", lambda *_: [])
    assert prepare("gpt", str(source), {}, tokenizer=str(folder)).flags["--data-path"] != with_them


@pytest.mark.parametrize("sft", [False, True])
def test_train_takes_it(folder: Path, capsys: pytest.CaptureFixture[str], *, sft: bool) -> None:
    source = folder.parent / "lines.jsonl"
    source.write_text(json.dumps({"messages": CHAT} if sft else {"text": TEXTS[0]}) + "\n")
    words = ["--procs", "2", "--data", str(source), "--tokenizer", str(folder), "--dry-run"]
    assert main([*words, *(["--sft"] if sft else [])]) == 0
    said = capsys.readouterr().out
    assert f"--tokenizer-model {folder}/tokenizer.json" in said
    assert "--tokenizer-type HuggingFaceTokenizer" in said


def test_a_tokenizer_that_cannot_work_is_named(folder: Path) -> None:
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|none|>"}')
    with pytest.raises(DataError, match=r"eos_token is '<\|none\|>', which tokenizer.json lacks"):
        HuggingFaceTokenizer(str(folder))
    config.unlink()
    with pytest.raises(DataError, match="name the end of a text in"):
        HuggingFaceTokenizer(str(folder))
    config.write_text("[1]")
    with pytest.raises(DataError, match="not a JSON object"):
        HuggingFaceTokenizer(str(folder))
    file.write_text('{"model": 1}')
    with pytest.raises(DataError, match="not a tokenizer"):
        HuggingFaceTokenizer(str(file))
    with pytest.raises(DataError, match=r"--tokenizer-model .*none"):
        HuggingFaceTokenizer(str(folder / "none"))
    words = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1 "
    words += "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --mock-data "
    words += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {file}"
    with pytest.raises(ConfigError, match=r"BERT needs BertWordPieceLowerCase"):
        preflight.check("bert", words.split(), 1)
