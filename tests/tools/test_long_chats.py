"""Chats of many turns: what one rendering of them tells is what renderings of their beginnings
tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp_train.data import chats
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.data.json_lines import BadLine
from megatron.dpp_train.tokenizers import GPT2BPETokenizer
from megatron.dpp_train.tokenizers.templates import ChatTemplate, TemplateRefusal
from tests.conftest import REPOSITORY
from tests.tools.chats_of_all_kinds import CHATS, TEMPLATES
from tests.tools.test_chat_templates import file_id, packaged_templates

_SAYS = "[{{ m.role }}]{{ m.content }}"
_ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
_LOOP = "{% for m in messages %}" + _SAYS
FOLLOWED = {
    "first": f"{{{{ messages[0].role }}}}{_LOOP}{{% endfor %}}{_ASK}",
    "rest": "{% set rest = messages[1:] %}{% for m in rest %}" + _SAYS + "{% endfor %}" + _ASK,
    "before": f"{_LOOP}{{{{ loop.previtem.role if not loop.first }}}}{{% endfor %}}{_ASK}",
    "last": f"{_LOOP}{{% if loop.last %}}{_ASK}{{% endif %}}{{% endfor %}}",
    "counts": "{% set ns = namespace(n=0) %}" + _LOOP + "{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages | length }}" + _ASK,
    "skips": f"{_LOOP}{{% if loop.index % 2 %}}{{% continue %}}{{% endif %}}!{{% endfor %}}{_ASK}",
    "cycles": f"{_LOOP}{{{{ loop.cycle('a', 'b', 'c') }}}}{{% endfor %}}{_ASK}",
    "looks at the end": _LOOP + "{% endfor %}{{ messages[-1].content }}{% if messages[-1].role =="
    " 'user' and add_generation_prompt %}[assistant]{% endif %}",
    "dates at the end": f"{_LOOP}{{% endfor %}}{_ASK}{{% if messages | length > 4 %}}"
    "{{ strftime_now('%Y') }}{% endif %}",
    "loops within": _LOOP + "{% for c in 'ab' %}{{ loop.index }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ loop.index }}{% endfor %}" + _ASK,
    "twice the same": f"{{% for m in 'ab' %}}{{{{ m }}}}{{% endfor %}}{_LOOP}{{% endfor %}}{_ASK}",
    "refuses": _LOOP + "{% if loop.index > 5 %}{{ raise_exception('5') }}{% endif %}{% endfor %}",
    "refuses an end": _LOOP + "{% endfor %}{{ raise_exception('5') if messages | length == 13 }}",
}
NOT_FOLLOWED = {
    "the number first": f"{{{{ messages | length }}}}{_LOOP}{{% endfor %}}{_ASK}",
    "the last first": f"{{{{ messages[-1].content }}}}{_LOOP}{{% endfor %}}{_ASK}",
    "backwards": f"{{% for m in messages[::-1] %}}{_SAYS}{{% endfor %}}{_ASK}",
    "twice": f"{_LOOP}{{% endfor %}}{_LOOP}{{% endfor %}}{_ASK}",
    "from the end": f"{_LOOP}{{{{ loop.revindex }}}}{{% endfor %}}{_ASK}",
    "the next": f"{_LOOP}{{{{ loop.nextitem.role }}}}{{% endfor %}}{_ASK}",
    "roles": f"{{{{ messages | map(attribute='role') | join }}}}{_LOOP}{{% endfor %}}{_ASK}",
    "as JSON": f"{_LOOP}{{% endfor %}}{{{{ messages | tojson }}}}",
    "no list": f"{_LOOP}{{% endfor %}}{{{{ 'x' if messages.append }}}}{_ASK}",
    "changes": f"{_LOOP}{{{{ loop.changed(m.role) }}}}{{% endfor %}}{_ASK}",
    "joiner": "{% set j = joiner() %}{% for m in messages %}{{ j() }}" + _SAYS + "{% endfor %}",
    "used up": "{% set i = 'abcdefghij' | map('upper') %}" + _LOOP + "{{ i | first }}{% endfor %}",
    "keeps one that is used up": "{% set ns = namespace(i=0) %}{% set ns.i = 'abcdefghij' | "
    "map('upper') %}" + _LOOP + "{{ ns.i | first }}{% endfor %}",
    "hides": "{% set x = 1 %}" + _LOOP + "{% set x = 2 %}{% endfor %}{{ x }}" + _ASK,
    "stops": f"{_LOOP}{{% if loop.index > 3 %}}{{% break %}}{{% endif %}}{{% endfor %}}{_ASK}",
    "filters": "{% for m in messages if m.role != 'system' %}" + _SAYS + "{% endfor %}" + _ASK,
    "sets behind": _LOOP + "{% endfor %}{% set x = messages | length %}{{ x }}" + _ASK,
    "a copy": "{% for m in messages | list %}" + _SAYS + "{% endfor %}" + _ASK,
    "no messages": "{{ messages[0].content }}{% for c in 'ab' %}{{ c }}{% endfor %}",
    "our names": "{{ dpp__ends }}" + _LOOP + "{% endfor %}" + _ASK,
}
SOME = ("system, two turns", "reasoning", "a call and words", "parts")
TOKENS = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}


def longer(chat: dict[str, Any], times: int) -> dict[str, Any]:
    """A chat whose turns behind the system message come several times, none like another."""
    first = [each for each in chat["messages"] if each["role"] == "system"]
    turns = [each for each in chat["messages"] if each["role"] != "system"] * times
    draw = random.Random(len(turns))
    for number, each in enumerate(turns):
        if isinstance(each.get("content"), str) and each["content"] and draw.random() < 0.7:
            turns[number] = {**each, "content": f"{each['content']} {number}"}
    return {**chat, "messages": first + turns}


def compare_texts(template: str, names: Iterable[str] = SOME) -> tuple[int, int]:
    """The numbers of beginnings that a rendering of their chats has told, and of all others that
    have a text; the former are those of the beginnings alone."""
    compiled, told, others = ChatTemplate(template, TOKENS), 0, 0
    for chat in (longer(CHATS[name], 3) for name in names):
        messages = chat["messages"]
        more = {"tools": chat.get("tools"), **chat.get("chat_template_kwargs", {})}
        counts = set(range(len(messages) + 1))
        found = compiled.beginnings(messages, counts, counts, **more)
        for count in counts:
            for beginnings, ask in zip(found, (True, False), strict=True):
                try:
                    alone = compiled.render(messages[:count], ask=ask, **more).text
                except TemplateRefusal:
                    assert count not in beginnings
                    continue
                if count not in beginnings:
                    others += 1
                    continue
                told += 1
                one = beginnings[count]
                assert (str(one), len(one), one.dated) == (alone, len(alone), compiled.wrote_date)
    return told, others


@pytest.mark.parametrize("name", [*TEMPLATES, *FOLLOWED])
def test_one_rendering_tells_the_texts_of_beginnings(name: str) -> None:
    told, others = compare_texts({**TEMPLATES, **FOLLOWED}[name])
    assert told > others


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_one_rendering_cannot_tell_is_left_out(name: str) -> None:
    told, others = compare_texts(NOT_FOLLOWED[name])
    assert others > told


@pytest.fixture(scope="module")
def tokenizer() -> GPT2BPETokenizer:
    folder = REPOSITORY / "datasets_gpt"
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def same_samples(
    tokenizer: GPT2BPETokenizer, template: str, names: Iterable[str], patch: pytest.MonkeyPatch
) -> bool:
    """True if samples and notes of chats, or why there are none, are those of renderings alone."""
    encoder = ChatEncoder(tokenizer, {"default": template})
    found: dict[int, list[Any]] = {0: [], 1 << 30: []}
    for few, name in itertools.product(found, names):
        patch.setattr(chats, "FEW", few)
        try:
            found[few].append(encoder.encode(longer(CHATS[name], 3)))
        except BadLine as error:
            found[few].append(str(error))
    return found[0] == found[1 << 30]


@pytest.mark.parametrize("name", [*TEMPLATES, *FOLLOWED, *NOT_FOLLOWED])
def test_samples_are_those_of_renderings_alone(
    tokenizer: GPT2BPETokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = {**TEMPLATES, **FOLLOWED, **NOT_FOLLOWED}[name]
    assert same_samples(tokenizer, template, SOME, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("file", list(packaged_templates()))
def test_samples_of_packaged_templates_are_those_of_renderings_alone(
    tokenizer: GPT2BPETokenizer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = file.read_text(encoding="utf-8").replace("eos_token", "'<|endoftext|>'")
    told, others = compare_texts(template, CHATS)
    assert same_samples(tokenizer, template, CHATS, monkeypatch)
    print(f"{file_id(file)}: {told} told, {others} alone")


@pytest.mark.parametrize("name", ["one turn", "thinking in the text"])
def test_a_chat_of_many_turns_is_rendered_a_few_times(
    tokenizer: GPT2BPETokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer had two renderings of all turns before it, which took 16 s for 2,000 turns, and
    each message one where the template leaves a part of the chat out."""
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **more: rendered.append(1) or render(*a, **more)
    )
    encoder = ChatEncoder(tokenizer, {"default": TEMPLATES["earlier thinking dropped"]})
    samples, _ = encoder.encode(longer(CHATS[name], 20))
    assert len(rendered) < 6 and len(samples) == (40 if name == "thinking in the text" else 1)
