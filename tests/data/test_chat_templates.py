"""Chat templates give the text, ids and marks that they give in transformers."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp_train.data.chats import ChatEncoder, Sample
from megatron.dpp_train.data.rows import BadLine
from megatron.dpp_train.data.templates import ChatTemplate, TemplateRefusal
from megatron.dpp_train.data.tokenizer import build
from tests.data.chats_of_all_kinds import CHATS, TEMPLATES
from tests.hf import tiny

FOLDERS = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}
"""Packages with chat templates, and where they lie in them."""
LINES_REFUSED = (
    'the chat template has no place for "tools"',
    'the chat template has no place for "tool_calls"',
    "the template marks no answer",
)
"""Beginnings of reasons for which we refuse a line that transformers renders: it would be another
chat than the line says, or have no answer."""
ENDED = "the chat template ends an answer by the token of the next message: it is marked as its end"
PUT_BEHIND = "put answers behind the prompt of generation, which the template changes later"
CHANGED = "the template changes what comes before message"
PROMPTS_CHANGED = {
    *("axolotl-mistral_v2v3", "axolotl-mistral_v3_tekken", "axolotl-pixtral"),
    *("trl-diffusion_gemma", "trl-gemma4_v5"),
}
"""Templates that lose a system message or the end of a call once an answer follows: such lines are
refused."""


class Pair:
    """One tokenizer in both programs."""

    def __init__(self, folder: Path) -> None:
        import transformers

        tiny.add_tokenizer(folder, ["Who is Ada? A baker. <|start|>assistant\n"] * 3, 300)
        self.folder = folder
        self.ours = build("HuggingFaceTokenizer", tokenizer_model=str(folder))
        self.theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def apply(self, template: str, chat: dict[str, Any], count: int, **more: Any) -> Any:
        """The first messages of a chat as transformers has them."""
        return self.theirs.apply_chat_template(
            chat["messages"][:count],
            tools=chat.get("tools"),
            chat_template=template,
            **chat.get("chat_template_kwargs", {}),
            **more,
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("templates") / "tokenizer")


def text_by(compiled: ChatTemplate, chat: dict[str, Any], count: int, *, ask: bool) -> str | None:
    """Our text; None where the template refuses the messages."""
    more = {"tools": chat.get("tools"), **chat.get("chat_template_kwargs", {})}
    try:
        return compiled.render(chat["messages"][:count], ask=ask, **more).text
    except TemplateRefusal:
        return None


def text_of_theirs(
    pair: Pair, template: str, chat: dict[str, Any], count: int, *, ask: bool
) -> str | None:
    more = {"tokenize": False, "add_generation_prompt": ask}
    try:
        return str(pair.apply(template, chat, count, **more))
    except Exception:  # a template may fail in any way
        return None


def same_texts(pair: Pair, template: str) -> int:
    """The number of texts that both render, all of them equal: chats, and what precedes answers."""
    found = 0
    compiled = ChatTemplate(template, pair.ours.named)
    for name, chat in CHATS.items():
        messages = chat["messages"]
        answers = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        for count, ask in [(len(messages), False), *((n, True) for n in answers)]:
            wanted = text_of_theirs(pair, template, chat, count, ask=ask)
            assert text_by(compiled, chat, count, ask=ask) == wanted, f"{name}: {count}"
            found += wanted is not None
    return found


def same_samples(pair: Pair, template: str, *, changes_prompts: bool = False) -> Counter[str]:
    """Counts what became of the chats, whose ids and marks are those of transformers."""
    found: Counter[str] = Counter()
    encoder = ChatEncoder(pair.ours, {"default": template})
    marks_answers = ChatTemplate(template, pair.ours.named).marks_answers
    for name, chat in CHATS.items():
        last = max(n for n, each in enumerate(chat["messages"], 1) if each["role"] == "assistant")
        try:
            samples, notes = encoder.encode(chat)
        except BadLine as error:
            refused = text_of_theirs(pair, template, chat, last, ask=False) is None
            named = (*LINES_REFUSED, *([CHANGED] if changes_prompts else []))
            assert refused or str(error).startswith(named), f"{name}: {error}"
            found["refused by both" if refused else str(error)] += 1
            continue
        changed = [note for note in notes if note.startswith(("gave", "put", "turned"))]
        if changed:  # transformers renders other messages; ours stand in the text
            found[changed[0]] += 1
        elif marks_answers:
            ids, marks = marked_by_theirs(pair, template, chat)
            (sample,) = samples
            end = len(sample.ids)
            assert (sample.ids, sample.marks) == (ids[:end], marks[:end]), name
            assert not any(marks[end:]), name
            found["marked by the template"] += 1
        else:
            if ENDED in encoder.notes():  # one more token behind the answer
                samples[-1] = Sample(samples[-1].ids[:-1], samples[-1].marks[:-1])
            found[same_as_prompt_and_completion(pair, template, chat, last, samples, notes)] += 1
    return found


def marked_by_theirs(
    pair: Pair, template: str, chat: dict[str, Any]
) -> tuple[list[int], list[int]]:
    flags = {"return_dict": True, "return_assistant_tokens_mask": True}
    result = pair.apply(template, chat, len(chat["messages"]), **flags)
    return result["input_ids"], result["assistant_masks"]


def same_as_prompt_and_completion(
    pair: Pair,
    template: str,
    chat: dict[str, Any],
    last: int,
    samples: Sequence[Sample],
    notes: tuple[str, ...],
) -> str:
    """The last sample has the ids of the chat up to its last answer, whose mark begins where the
    ids of the prompt end, as TRL has it for a prompt and its completion."""
    whole = pair.apply(template, chat, last, return_dict=False)
    prompt = pair.apply(template, chat, last - 1, return_dict=False, add_generation_prompt=True)
    sample = samples[-1]
    if PUT_BEHIND in notes:
        assert sample.ids[: len(prompt)] == prompt
        assert sample.marks.index(1, len(prompt) - 1) == len(prompt)
        assert whole[-len(sample.ids[len(prompt) :]) :] == sample.ids[len(prompt) :]
        return PUT_BEHIND
    assert sample.ids == whole
    start = len(sample.marks) - [*sample.marks[::-1], 0].index(0)
    if whole[: len(prompt)] == prompt:
        assert start == len(prompt)
        return "as prompt and completion"
    assert start < len(prompt)
    return "a prompt that the chat does not begin with"


@pytest.mark.parametrize("name", TEMPLATES)
def test_our_templates_render_as_in_transformers(pair: Pair, name: str) -> None:
    assert same_texts(pair, TEMPLATES[name]) > 10
    outcomes = same_samples(pair, TEMPLATES[name])
    assert sum(outcomes.values()) == len(CHATS)


def packaged_templates() -> Iterator[Any]:
    """The templates of the packages that are installed."""
    for package, folder in FOLDERS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            reason = f"{package} is not installed (pip install --no-deps {package})"
            yield pytest.param(None, id=package, marks=pytest.mark.skip(reason=reason))
            continue
        files = sorted((Path(spec.submodule_search_locations[0]) / folder).glob("*.jinja"))
        yield from (pytest.param(file, id=file_id(file)) for file in files)


def file_id(file: Path) -> str:
    """The package and the name of a template."""
    return f"{'trl' if 'trl' in file.parts else 'axolotl'}-{file.stem}"


@pytest.mark.slow
@pytest.mark.parametrize("file", list(packaged_templates()))
def test_templates_of_packages_render_as_in_transformers(pair: Pair, file: Path) -> None:
    template = file.read_text(encoding="utf-8")
    assert same_texts(pair, template)
    changes = file_id(file) in PROMPTS_CHANGED
    outcomes = same_samples(pair, template, changes_prompts=changes)
    assert changes == any(each.startswith(CHANGED) for each in outcomes)
    assert sum(outcomes.values()) == len(CHATS)
    print(f"{file.stem}: {dict(outcomes)}")
