"""Chats: templates, the marks of answers, and lines that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_sample_data
import numpy
import pytest
import tokenizers

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.data.rows import BadLine
from megatron.dpp_train.data.templates import PLAIN, ChatTemplate, find_templates
from megatron.dpp_train.data.tokenizer import Tokenizer, build
from tests.conftest import REPOSITORY

VOCAB = REPOSITORY / "datasets_gpt" / "vocab.json"
MERGES = REPOSITORY / "datasets_gpt" / "merges.txt"
BRACKETS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build("GPT2BPETokenizer", vocab_file=str(VOCAB), merge_file=str(MERGES))


def text_of(ids: list[int]) -> str:
    """The text of ids of the sample's vocabulary."""
    text: str = tokenizers.ByteLevelBPETokenizer(str(VOCAB), str(MERGES)).decode(
        ids, skip_special_tokens=False
    )
    return text


def chat(*texts: str) -> dict[str, Any]:
    """Turns of a user and an assistant, by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


def encoder(tokenizer: Tokenizer, template: str) -> ChatEncoder:
    return ChatEncoder(tokenizer, {"default": template})


def samples(
    tokenizer: Tokenizer, template: str, document: dict[str, Any]
) -> list[tuple[list[int], list[int]]]:
    """Ids and marks of a line."""
    found, _ = encoder(tokenizer, template).encode(document)
    return [(each.ids, each.marks) for each in found]


def marked(tokenizer: Tokenizer, template: str, document: dict[str, Any]) -> list[str]:
    """The text of each run of equal marks."""
    ((ids, marks),) = samples(tokenizer, template, document)
    parts: list[list[int]] = []
    for place, token in enumerate(ids):
        if not place or marks[place] != marks[place - 1]:
            parts.append([])
        parts[-1].append(token)
    return [text_of(part) for part in parts]


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (PLAIN, ["User: Who?\nAssistant:", " Ada.<|endoftext|>",
                 "User: Why?\nAssistant:", " Bela.<|endoftext|>"]),
        (BRACKETS, ["[user]Who?<|endoftext|>[assistant]", "Ada.<|endoftext|>",
                    "[user]Why?<|endoftext|>[assistant]", "Bela.<|endoftext|>"]),
    ],
)  # fmt: skip
def test_answers_are_marked(tokenizer: Tokenizer, template: str, texts: list[str]) -> None:
    assert marked(tokenizer, template, chat("Who?", "Ada.", "Why?", "Bela.")) == texts
    ((ids, _),) = samples(tokenizer, template, chat("Who?", "Ada."))
    assert ids[-1] == tokenizer.eod


def test_a_sample_ends_with_its_last_answer(tokenizer: Tokenizer) -> None:
    marks = BRACKETS.replace("{{ m.content }}{{ eos_token }}", (
        "{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    ))  # fmt: skip
    found = marked(tokenizer, marks, chat("Who?", "Ada.", "Why?"))
    assert found == ["[user]Who?[assistant]", "Ada.<|endoftext|>"]


ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{{ m.tool_calls or '' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that ends an answer by the token of the next message, as GLM-4.5's does."""


def roles(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with a token for each role."""
    special = {f"<|{role}|>": 1400 + n for n, role in enumerate(("user", "assistant", "tool"))}

    class WithRoles(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text)

    return WithRoles(1409, tokenizer.eod, special, tokenizer.named)


def test_answers_that_a_template_does_not_end_learn_the_next_messages_token(
    tokenizer: Tokenizer,
) -> None:
    """Else the model never stops: also the last one, and one that calls a tool."""
    made = ChatEncoder(roles(tokenizer), {"default": ROLES})
    assert made.notes() == (
        "the chat template ends an answer by the token of the next message: it is marked as its "
        "end",
    )
    line = chat("Who?", "Ada.", "Why?", "Bela.")
    line["messages"].append({"role": "assistant", "content": "", "tool_calls": [{"name": "x"}]})
    (sample,), _ = made.encode(line)
    marked_ids = [i for i, mark in zip(sample.ids, sample.marks, strict=True) if mark]
    assert [i for i in marked_ids if i >= 1400] == [1400, 1401, 1402]
    assert sample.ids[-1] == 1402 and sample.ids.count(1400) == 2


def test_a_template_without_an_end_of_answers_or_with_a_date_is_told(tokenizer: Tokenizer) -> None:
    for template in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}",
    ):
        (said,) = encoder(tokenizer, template).notes()
        assert said.startswith("WARNING: the chat template marks no end of an answer")
    for template in (PLAIN, BRACKETS, MARKED):
        assert encoder(tokenizer, template).notes() == ()
    (said,) = encoder(tokenizer, "{{ strftime_now('%Y') }} " + PLAIN).notes()
    assert "today's date" in said  # the data keep the day on which they were made


def test_an_answer_stands_behind_its_prompt_where_the_template_changes_that(
    tokenizer: Tokenizer,
) -> None:
    """The template begins with the number of messages, which is another one with the answer."""
    texts = ["1[user]Who?<|endoftext|>[assistant]", "Ada.<|endoftext|>"]
    template = "{{ messages | length }}" + BRACKETS
    assert marked(tokenizer, template, chat("Who?", "Ada.")) == texts


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (chat("Who?", "  "), "the answer in message 2 is empty"),
        (chat("Who?"), "no message has the role assistant"),
        ({"text": "x"}, 'neither "messages"'),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1 lacks"),
        (chat("Who?<|endoftext|>", "Ada."), "special token"),
        (chat("Who?", "Ada \ud800"), "message 2 holds half a surrogate pair"),
        ({"messages": '[{"role": "user", "role": "tool"}]'}, "the key 'role' stands twice"),
        (
            {"conversations": [{"from": ["human"], "value": "a"}]},
            r"1 is from \['human'\]; expected",
        ),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "message 1 is from 'bot'"),
        ({"instruction": "a", "output": "b", "history": 5}, "no list of questions"),
    ],
)
def test_a_bad_chat_is_named(tokenizer: Tokenizer, document: dict[str, Any], why: str) -> None:
    with pytest.raises(BadLine, match=why):
        encoder(tokenizer, PLAIN).encode(document)


def test_a_template_that_refuses_or_rewrites_is_named(tokenizer: Tokenizer) -> None:
    refuses = "{{ raise_exception('no system message') }}"
    with pytest.raises(BadLine, match="no system message"):
        encoder(tokenizer, refuses).encode(chat("Who?", "Ada."))
    counts = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(BadLine, match="before message 2"):
        encoder(tokenizer, counts).encode(chat("Who?", "Ada."))
    with pytest.raises(DataError, match="not valid"):
        encoder(tokenizer, "{% for %}")


def test_an_end_that_the_vocabulary_lacks_is_refused() -> None:
    """It was trained on as the characters of its name."""
    tokenizer = Tokenizer(10, None, {}, {"eos_token": "<|end|>"})
    for template in (PLAIN, "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"):
        with pytest.raises(DataError, match=r"ends answers with <\|end\|>, which the vocabulary"):
            encoder(tokenizer, template)


def test_templates_are_found_beside_the_vocabulary(tmp_path: Path) -> None:
    vocab = str(tmp_path / "vocab.json")
    assert find_templates("auto", vocab) == find_templates("plain", vocab) == {"default": PLAIN}
    with pytest.raises(DataError, match="name a file, or plain"):
        find_templates("default", vocab)
    with pytest.raises(DataError, match="expected auto, default, plain, or a file"):
        find_templates("nowhere.jinja", vocab)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": BRACKETS}))
    wanted = {"default": BRACKETS}
    assert find_templates("default", vocab) == find_templates(str(config), None) == wanted
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_templates("auto", vocab) == {"default": "own"}


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


MARKED = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def answers(tokenizer: Tokenizer, template: str, document: dict[str, Any]) -> list[str]:
    """The text of each sample that has a loss."""
    return [
        text_of([i for i, mark in zip(ids, marks, strict=True) if mark])
        for ids, marks in samples(tokenizer, template, document)
    ]


def test_arguments_of_calls_are_rendered_as_they_are(tokenizer: Tokenizer) -> None:
    """They were trained with sorted keys, escaped HTML and in ASCII."""
    arguments = {"town": "Łódź", "day": 1, "note": "it's <b>"}
    said = '{"town": "Łódź", "day": 1, "note": "it\'s <b>"}<|endoftext|>'
    for given in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        call = {"type": "function", "function": {"name": "rain", "arguments": given}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        document = {"messages": [{"role": "user", "content": "Rain?"}, turn]}
        assert answers(tokenizer, CALLS, document) == [said]
    call["function"]["arguments"] = '{"town": "Łódź", "town": "K"}'
    with pytest.raises(BadLine, match="arguments of a call: the key 'town' stands twice"):
        answers(tokenizer, CALLS, document)


def test_a_message_of_a_role_that_the_template_drops_is_named(tokenizer: Tokenizer) -> None:
    """`Assistant` and `function` were dropped, and the rest was trained on as the whole chat."""
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]"
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    line = chat("Who?", "Ada.", "Why?", "Bela.")
    line["messages"][1]["role"] = "Assistant"
    with pytest.raises(BadLine, match="leaves out message 2, whose role is 'Assistant'; usual"):
        encoder(tokenizer, template).encode(line)
    line["messages"][1]["role"] = "tool"
    _, notes = encoder(tokenizer, template).encode(line)
    assert 'the template leaves out or changes messages of the role "tool"' in notes


def test_looking_for_what_is_left_out_takes_a_few_renderings(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message of a chat had one."""
    template = BRACKETS.replace("m.content }}", "m.content | replace('x', '') }}")
    whole = chat(*["Who?", "Ada."] * 20)
    rendered: list[int] = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **more: rendered.append(1) or render(*a, **more)
    )
    encoder(tokenizer, template).encode(whole)
    few = len(rendered)
    whole["messages"][0]["content"] = "Max?"
    _, notes = encoder(tokenizer, template).encode(whole)
    assert any("leaves out a part" in note for note in notes) and len(rendered) < 2 * few + 6


def test_fields_that_a_table_adds_to_tools_and_calls_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    """`Dataset.to_json` writes the fields of all rows, and models learned `"day": null`."""

    def line(**more: None) -> dict[str, Any]:
        call = {
            "type": "function",
            "function": {"name": "rain", "arguments": {"town": "K", **more}},
        }
        schema = {"type": "object", "properties": {"town": {"type": "string"}, **more}}
        tool = {"type": "function", "function": {"name": "rain", "parameters": schema}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "Rain?"}, answer], "tools": [tool]}

    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    wanted, notes = encoder(tokenizer, template).encode(line())
    found, more = encoder(tokenizer, template).encode(line(day=None))
    assert found == wanted and not any("null" in note for note in notes)
    assert any(note.startswith('left out fields of "null"') for note in more)


def test_tools_beside_the_messages_reach_the_template(tokenizer: Tokenizer) -> None:
    """They were dropped without a word."""
    tools = [{"type": "function", "function": {"name": "rain", "description": "a <b>"}}]
    for given in (tools, json.dumps(tools)):
        document = {**chat("Rain?", "No."), "tools": given}
        text = "".join(marked(tokenizer, CALLS, document))
        assert text.startswith(json.dumps(tools) + "[user]Rain?")
    with pytest.raises(BadLine, match='has no place for "tools"'):
        encoder(tokenizer, PLAIN).encode(document)


@pytest.mark.parametrize("template", [BRACKETS, MARKED])
def test_answers_in_a_prompt_have_no_loss(tokenizer: Tokenizer, template: str) -> None:
    messages = chat("Who?", "Ada.", "Why?", "Bread.")["messages"]
    document = {"prompt": messages[:3], "completion": messages[3:]}
    assert answers(tokenizer, template, document) == ["Bread.<|endoftext|>"]


@pytest.mark.parametrize("template", [BRACKETS, MARKED])
@pytest.mark.parametrize(
    "field", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}, {"loss": 0.0}]
)
def test_an_answer_without_weight_has_no_loss(
    tokenizer: Tokenizer, template: str, field: dict[str, Any]
) -> None:
    """In the message, in its parts, in a completion and beside the messages."""
    document = chat("Who?", "Ada.", "Why?", "Bread.")
    parts = chat("Who?", "Ada.", "Why?", "Bread.")
    parts["messages"][1]["content"] = [{"type": "text", "text": "Ada."} | field]
    document["messages"][1] |= field
    completion = {"prompt": "Hi", "completion": document["messages"]}
    for line in (document, parts, completion):
        assert answers(tokenizer, template, line) == ["Bread.<|endoftext|>"]
    document["messages"][3] |= field
    for line in (document, {**chat("Who?", "Ada."), **field}):
        with pytest.raises(BadLine, match="none of its answers has a loss"):
            encoder(tokenizer, template).encode(line)
    content = parts["messages"][1]["content"]
    content.append({"type": "text", "text": "!"} | dict.fromkeys(field, 1))
    with pytest.raises(BadLine, match="message 2 has parts with and without a loss"):
        encoder(tokenizer, template).encode(parts)


def test_fields_that_nobody_reads_are_named(tokenizer: Tokenizer) -> None:
    line = {**chat("Who?", "Ada."), "id": 7, "source": "x", "empty": None}
    _, notes = encoder(tokenizer, PLAIN).encode(line)
    assert notes == ("read as messages", 'field "id" is not used', 'field "source" is not used')
    line["messages"][1] |= {"mood": "calm", "reasoning": "Hm.", "name": "a"}
    _, notes = encoder(tokenizer, PLAIN).encode(line)
    wanted = [f'field "{name}" of answers is not used' for name in ("mood", "reasoning")]
    assert [note for note in notes if "of answers" in note] == wanted
    reads = PLAIN.replace("{{ message.content }}", "{{ message.mood }}{{ message.content }}")
    _, notes = encoder(tokenizer, reads + "{# thinking #}").encode(line)
    assert not any("of answers" in note for note in notes)


REFUSED = (
    *("chosen", "rejected", "images", "image", "videos", "audios", "audio", "functions"),
    *("function_call", "refusal", "train_detail", "training_detail"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_change_the_training_are_refused_by_name(
    tokenizer: Tokenizer, name: str
) -> None:
    """In the line and in a message."""
    line, message = {**chat("Who?", "Ada."), name: [1]}, chat("Who?", "Ada.")
    message["messages"][1][name] = "x"
    for document, where in ((line, "the line"), (message, "message 2")):
        with pytest.raises(BadLine, match=f'{where} has "{name}": '):
            encoder(tokenizer, CALLS).encode(document)


@pytest.mark.parametrize(
    ("of_line", "of_answer", "why"),
    [
        ({"label": False}, {}, 'has "label"'),
        *(({"chat_template_kwargs": x}, {}, "chat_template_kwargs") for x in ([1], 5, [{}])),
        ({"tools": "no JSON"}, {}, '"tools" is a text, but no JSON'),
        ({}, {"weight": 0.5}, r"message 2: .weight. is 0\.5"),
        ({}, {"tool_calls": {"name": "x"}}, "tool_calls"),
        ({}, {"content": [{"type": "image_url", "image_url": {}}]}, "message 2 has a part"),
        ({}, {"role": "a\nb"}, "message 2 lacks a line of text for role"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_bad_lines(
    tokenizer: Tokenizer, of_line: dict[str, Any], of_answer: dict[str, Any], why: str
) -> None:
    document = {**chat("Who?", "Ada."), **of_line}
    document["messages"][1] |= of_answer
    with pytest.raises(BadLine, match=why):
        encoder(tokenizer, CALLS).encode(document)


SHARE_GPT = {
    "system": "Be terse.",
    "conversations": [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": '{"name": "rain", "arguments": {"town": "Köln"}}'},
        {"from": "observation", "value": "no"},
        {"from": "gpt", "value": "None."},
    ],
}
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hi", "Ho"]]}


def test_other_forms_are_chats(tokenizer: Tokenizer) -> None:
    assert marked(tokenizer, CALLS, SHARE_GPT) == [
        "[system]Be terse.<|endoftext|>[user]Rain?<|endoftext|>[assistant]",
        '{"town": "Köln"}<|endoftext|>', "[tool]no<|endoftext|>[assistant]", "None.<|endoftext|>",
    ]  # fmt: skip
    line = {"prompt": "Who?", "completion": "Ada."}
    assert samples(tokenizer, PLAIN, line) == samples(tokenizer, PLAIN, chat("Who?", "Ada."))
    assert marked(tokenizer, PLAIN, ALPACA) == [
        "User: Hi\nAssistant:", " Ho<|endoftext|>",
        "User: Add.\n1 and 2\nAssistant:", " 3<|endoftext|>",
    ]  # fmt: skip


def test_each_answer_has_a_sample_where_earlier_turns_change(tokenizer: Tokenizer) -> None:
    """Such chats were refused: Qwen3's and Phi-3's templates make them."""
    drops = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    document = chat("Who?", "<think>Hm</think>Ada.", "Why?", "<think>So</think>Bread.")
    _, second = samples(tokenizer, drops, document)
    assert text_of(second[0]) == (
        "[user]Who?<|endoftext|>[assistant]Ada.<|endoftext|>[user]Why?<|endoftext|>[assistant]"
        "<think>So</think>Bread.<|endoftext|>"
    )
    assert answers(tokenizer, drops, document) == [
        "<think>Hm</think>Ada.<|endoftext|>", "<think>So</think>Bread.<|endoftext|>",
    ]  # fmt: skip
    _, notes = encoder(tokenizer, drops).encode(document)
    assert any(note.startswith("made one sample per answer") for note in notes)


def test_a_prompt_that_chats_do_not_hold_precedes_no_answer(tokenizer: Tokenizer) -> None:
    """DeepSeek's distilled models are asked with a tag that their chats do not hold."""
    asks = BRACKETS.replace("[assistant]{% endif", "[assistant]<think>\n{% endif")
    for text in ("Ada.", "<b>", "<think>"):
        assert answers(tokenizer, asks, chat("Who?", text)) == [f"{text}<|endoftext|>"]
