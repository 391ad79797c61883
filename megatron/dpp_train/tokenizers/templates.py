"""Chat templates, rendered as transformers renders them.

The environment of Jinja has transformers' filters, functions and tags, so that a model trains on
the text that it is asked with later. transformers itself is no dependency: data must not depend on
what else is installed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
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


@dataclass(frozen=True)
class Beginning:
    """The text of a beginning: so many characters of ``whole``, and ``rest``."""

    whole: str
    shared: int
    rest: str = ""
    dated: bool = False
    """It holds today's date or time, from ``strftime_now``."""

    @classmethod
    def of(cls, text: str) -> Beginning:
        """A text that shares nothing."""
        return cls(text, len(text))

    def __len__(self) -> int:
        return self.shared + len(self.rest)

    def __str__(self) -> str:
        return self.whole[: self.shared] + self.rest

    def starts_with(self, other: Beginning) -> bool:
        """True where ``other`` is a beginning of this text."""
        if self.whole is not other.whole or self.shared < other.shared:
            return str(self).startswith(str(other))
        end = other.shared + len(other.rest)
        return (self.whole[other.shared : min(end, self.shared)] + self.rest).startswith(other.rest)


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
        self.text, self._tokens = text, tokens
        self._environment = _environment()
        self.wrote_date = False
        """The last text holds today's date or time, from ``strftime_now``."""
        try:
            with budget(SECONDS, MEMORY_BYTES):
                self._template = self._environment.from_string(text, globals=tokens)
        except Exception as error:  # Jinja's own, and what Python says of the code that it makes
            raise DataError(f"the chat template is not valid: {_reason(error)}") from error

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
        chat = [_without_none(message) for message in messages]
        pieces: list[str] = []
        try:
            self._write(self._template, pieces, {"messages": chat}, ask=ask, **more)
        except Exception as error:  # a template computes what it wants
            raise TemplateRefusal(_reason(error)) from error
        return Rendered("".join(pieces), tuple(self._environment.answers))

    def beginnings(
        self, messages: Sequence[Mapping[str, Any]], asked: set[int], ended: set[int], **more: Any
    ) -> tuple[dict[int, Beginning], dict[int, Beginning]]:
        """The texts that :meth:`render` gives for the first messages, by their number: of ``asked``
        with what precedes an answer, of ``ended`` without. Those that one rendering of each kind
        cannot tell are left out."""
        from megatron.dpp_train.tokenizers.beginnings import NotFollowed, Run

        template = self._followed
        if template is None:
            return {}, {}
        chat = [_without_none(message) for message in messages]
        runs = [Run(chat, counts, self._environment) for counts in (asked, ended)]
        for run, ask in zip(runs, (True, False), strict=True):
            # An error is that of a beginning, which its own rendering will name.
            with contextlib.suppress(Exception, NotFollowed):
                self._write(template, run.pieces, run.variables(), ask=ask, **more)
        texts = [run.shared for run in runs]
        longest = max(texts, key=len)
        texts = [longest if longest.startswith(text) else text for text in texts]
        first, second = (
            {count: Beginning(text, *parts) for count, parts in run.found.items()}
            for run, text in zip(runs, texts, strict=True)
        )
        return first, second

    def _write(
        self, template: Any, pieces: list[str], given: dict[str, Any], *, ask: bool, **more: Any
    ) -> None:
        given = {"tools": None, "documents": None, **more, **given}
        self._environment.begin(pieces)
        with budget(SECONDS, MEMORY_BYTES):
            for piece in template.generate(add_generation_prompt=ask, **given):
                pieces.append(piece)  # one by one: blocks look at what stands before them
        self.wrote_date = self._environment.wrote_date

    @cached_property
    def _followed(self) -> Any:
        """The template as :class:`~megatron.dpp_train.tokenizers.beginnings.Run` needs it; None
        where it cannot be followed."""
        from megatron.dpp_train.tokenizers.beginnings import followed

        try:
            with budget(SECONDS, MEMORY_BYTES):
                tree = followed(self._environment, self.text)
                return tree and self._environment.from_string(tree, globals=self._tokens)
        except Exception:  # as in __init__
            return None


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
