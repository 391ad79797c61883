"""Chat templates, rendered as transformers renders them.

The environment of Jinja has transformers' filters, functions and tags, so that a model trains on
the text that it is asked with later. transformers itself is no dependency: data must not depend on
what else is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from megatron.dpp.budget import OverBudget, budget
from megatron.dpp.errors import DataError, one_line
from megatron.dpp_train.tokenizers.base import Tokenizer

SECONDS = 5.0
MEMORY_BYTES = 1 << 30
_MOST_BITS = 4096
"""Bounds of one rendering: a template is a program of whoever made the model."""
Span = tuple[int, int]
"""First character, and the one behind the last."""

ANSWER = "\ue000"
"""An answer that no chat has, to find where answers begin and end."""
_REASONING = "reasoning_content", "thinking", "reasoning"
"""Names of an answer's reasoning; templates read the first or the second."""


class TemplateRefusal(Exception):
    """The template cannot render a chat; the text says why."""


@dataclass(frozen=True)
class Rendered:
    """A chat's text, and where ``{% generation %}`` blocks lie in it."""

    text: str
    answers: tuple[Span, ...]


class ChatTemplate:
    """A compiled template.

    Args:
        text: of the template.
        tokens: what the template may name, such as ``bos_token``.

    Raises:
        DataError: ``text`` is no template, or Jinja is not installed.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        try:
            import jinja2  # noqa: F401 - the error for a missing package
        except ModuleNotFoundError:
            raise DataError("chats need Jinja; pip install jinja2") from None
        self.text = text
        self._environment = _environment()
        try:
            with budget(SECONDS, MEMORY_BYTES):
                self._template = self._environment.from_string(text, globals=tokens)
        except Exception as error:  # Jinja's own, and what Python says of the code that it makes
            raise DataError(f"the chat template is not valid: {_reason(error)}") from error

    @property
    def wrote_date(self) -> bool:
        """The last text holds today's date or time, from ``strftime_now``."""
        return bool(self._environment.wrote_date)

    @property
    def marks_answers(self) -> bool:
        """The template has ``{% generation %}`` blocks."""
        return bool(self._environment.has_generation)

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool, **more: Any) -> Rendered:
        """The text of a chat.

        Args:
            ask: end with what precedes an answer (``add_generation_prompt``).
            more: further variables, such as ``tools``.

        Raises:
            TemplateRefusal: the template does not take it.
        """
        given = {"tools": None, "documents": None, **more}
        chat = [_without_none(message) for message in messages]
        pieces: list[str] = []
        self._environment.begin(pieces)
        try:
            with budget(SECONDS, MEMORY_BYTES):
                for piece in self._template.generate(
                    messages=chat, add_generation_prompt=ask, **given
                ):
                    pieces.append(piece)  # one by one: blocks look at what stands before them
        except Exception as error:  # a template computes what it wants
            raise TemplateRefusal(_reason(error)) from error
        return Rendered("".join(pieces), tuple(self._environment.answers))


def last_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token with which the template ends an answer; None where it has none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        _, found, end = template.render(chat, ask=False).text.rpartition(ANSWER)
    except TemplateRefusal:
        return None
    special = tokenizer.special_tokens()
    ids = tokenizer.tokenize_chat(end if found else "", (), special)[0]
    return next((each for each in reversed(ids) if each in special.values()), None)


def _reason(error: Exception) -> str:
    """The reason of a failure, on one line."""
    if isinstance(error, OverBudget):
        return f"it takes more than {SECONDS:g} s"
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY_BYTES >> 20} MiB"
    return one_line(error, 300)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty fields, with its reasoning under the names that templates read."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _environment() -> Any:
    """transformers' environment: ``tojson`` that writes JSON as it is, ``raise_exception``,
    ``strftime_now``, loop controls and ``{% generation %}``."""
    from jinja2.ext import Extension
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        has_generation = False
        wrote_date = False
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # No signal ends the multiplication of long whole numbers.
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length()
                bits = bits + right.bit_length() if operator == "*" else bits * abs(right)
                if bits > _MOST_BITS:
                    raise OverflowError(f"a whole number of {bits} bits")
            return super().call_binop(context, operator, left, right)

        def now(self, form: str) -> str:
            self.wrote_date = True
            return datetime.now().strftime(form)

        def begin(self, pieces: list[str]) -> None:
            self.wrote_date = False
            self.answers: list[Span] = []
            self._pieces, self._counted, self._length = pieces, 0, 0

        def length(self) -> int:
            """Characters that are written."""
            self._length += sum(map(len, self._pieces[self._counted :]))
            self._counted = len(self._pieces)
            return self._length

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012
        environment: Any

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            self.environment.has_generation = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text: str = caller()
            start = self.environment.length()
            self.environment.answers.append((start, start + len(text)))
            return text

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": environment.now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
