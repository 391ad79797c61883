"""Chats: templates, the marks of answers, and lines that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_sample_data
import numpy
import pytest

from megatron.dpp.commands import preprocess
from megatron.dpp.commands.chats import PLAIN, ChatEncoder, find_template
from megatron.dpp.commands.json_lines import BadLine
from megatron.dpp.errors import DataError
from megatron.dpp.tokenizers import GPT2BPETokenizer
from tests.conftest import REPOSITORY

VOCAB = REPOSITORY / "datasets_gpt" / "vocab.json"
MERGES = REPOSITORY / "datasets_gpt" / "merges.txt"
BRACKETS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> GPT2BPETokenizer:
    return GPT2BPETokenizer(str(VOCAB), str(MERGES))


def chat(*texts: str) -> dict[str, Any]:
    """Turns of a user and an assistant, by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


def marked(tokenizer: GPT2BPETokenizer, template: str, document: dict[str, Any]) -> list[str]:
    """The text of each run of equal marks."""
    ids, marks = ChatEncoder(tokenizer, template).encode(document)
    parts: list[list[int]] = []
    for place, token in enumerate(ids):
        if not place or marks[place] != marks[place - 1]:
            parts.append([])
        parts[-1].append(token)
    return [tokenizer.detokenize(part) for part in parts]


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (PLAIN, ["User: Who?\nAssistant:", " Ada.<|endoftext|>",
                 "User: Why?\nAssistant:", " Bela.<|endoftext|>"]),
        (BRACKETS, ["[user]Who?<|endoftext|>[assistant]", "Ada.<|endoftext|>",
                    "[user]Why?<|endoftext|>[assistant]", "Bela.<|endoftext|>"]),
    ],
)  # fmt: skip
def test_answers_are_marked(tokenizer: GPT2BPETokenizer, template: str, texts: list[str]) -> None:
    assert marked(tokenizer, template, chat("Who?", "Ada.", "Why?", "Bela.")) == texts
    ids, _ = ChatEncoder(tokenizer, template).encode(chat("Who?", "Ada."))
    assert ids[-1] == tokenizer.eod


def test_prompt_and_completion_are_a_chat(tokenizer: GPT2BPETokenizer) -> None:
    encoder = ChatEncoder(tokenizer, PLAIN)
    line = {"prompt": "Who?", "completion": "Ada."}
    assert encoder.encode(line) == encoder.encode(chat("Who?", "Ada."))


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (chat("Who?", "  "), "the answer in message 2 is empty"),
        (chat("Who?"), "no message has the role assistant"),
        ({"text": "x"}, 'neither "messages"'),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1 lacks"),
        (chat("Who?<|endoftext|>", "Ada."), "special token"),
    ],
)
def test_a_bad_chat_is_named(
    tokenizer: GPT2BPETokenizer, document: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadLine, match=why):
        ChatEncoder(tokenizer, PLAIN).encode(document)


def test_a_template_that_refuses_or_rewrites_is_named(tokenizer: GPT2BPETokenizer) -> None:
    refuses = "{{ raise_exception('no system message') }}"
    with pytest.raises(BadLine, match="no system message"):
        ChatEncoder(tokenizer, refuses).encode(chat("Who?", "Ada."))
    counts = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(BadLine, match="before message 2"):
        ChatEncoder(tokenizer, counts).encode(chat("Who?", "Ada."))
    with pytest.raises(DataError, match="not valid"):
        ChatEncoder(tokenizer, "{% for %}")


def test_an_end_that_the_vocabulary_lacks_is_refused() -> None:
    """It was trained on as the characters of its name."""
    tokenizer = GPT2BPETokenizer(str(VOCAB), str(MERGES))
    del tokenizer.vocab["<|endoftext|>"]
    for template in (PLAIN, "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"):
        with pytest.raises(DataError, match=r"ends answers with <\|endoftext\|>, which the"):
            ChatEncoder(tokenizer, template)


def test_templates_are_found_beside_the_vocabulary(tmp_path: Path) -> None:
    vocab = str(tmp_path / "vocab.json")
    assert find_template("auto", vocab) == find_template("plain", vocab) == PLAIN
    with pytest.raises(DataError, match="name a file, or plain"):
        find_template("default", vocab)
    with pytest.raises(DataError, match="expected auto, default, plain, or a file"):
        find_template("nowhere.jinja", vocab)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": BRACKETS}))
    assert find_template("default", vocab) == find_template(str(config), None) == BRACKETS
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_template("auto", vocab) == "own"


def test_chats_become_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = list(make_sample_data.make_chats(20, 5, median=8))
    make_sample_data.write_jsonl(tmp_path / "chats.jsonl", chats)
    words = f"--input {tmp_path}/chats.jsonl --output-prefix {tmp_path}/x --sft --workers 1 "
    words += f"--tokenizer-type GPT2BPETokenizer --vocab-file {VOCAB} --merge-file {MERGES}"
    assert preprocess.main(words.split()) == 0
    assert "20 documents" in capsys.readouterr().out
    tokens, marks = (
        numpy.fromfile(tmp_path / f"x_{key}_document.bin", dtype=numpy.uint16)
        for key in ("chat", "answers")
    )
    assert len(tokens) == len(marks) and set(marks) == {0, 1} and marks[-1] == 1
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps(chat("Who?", "")) + "\n")
    assert preprocess.main(words.split()) == 1
    assert "line 21: the answer in message 2 is empty" in capsys.readouterr().err


def test_lengths_of_sample_chats_are_lognormal() -> None:
    chats = list(make_sample_data.make_chats(400, 3, median=50))
    words = sorted(
        sum(len(m["content"].split()) for m in each["messages"] if m["role"] == "assistant")
        for each in chats
    )
    assert 40 < words[200] < 60 and 2 < words[336] / words[200] < 3.5
