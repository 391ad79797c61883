"""Chat templates are programs of strangers: whatever one does is a refusal, in bounded time."""

from __future__ import annotations

import resource
import signal
import threading
import time

import pytest

from megatron.dpp.budget import OverBudget, budget
from megatron.dpp.errors import DataError
from megatron.dpp_train.data.chat_lines import read_chat
from megatron.dpp_train.data.json_lines import BadLine
from megatron.dpp_train.tokenizers import templates
from megatron.dpp_train.tokenizers.templates import ChatTemplate, TemplateRefusal

_MESSAGES = [{"role": "user", "content": "x"}]
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{{ 1 % 0 }}",
        "{{ 2.0 ** 99999 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages | tojson | length | foo }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ 'x' | center(10 ** 11) }}",
        "{{ '%100000000000d' % 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ strftime_now(1) }}",
        "{{ raise_exception('no') }}",
        "{{ '\\ud800'.encode() }}",
        "{{ namespace(1) }}",
        "{% include 'x' %}",
        "{{ messages.append(1) }}",
        _LOOP,
        "{{ 7 ** (10 ** 9) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
    ],
)
def test_a_template_is_refused_whatever_it_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    start = time.monotonic()
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    try:
        template = ChatTemplate(text, {})
    except DataError as error:
        assert str(error).startswith("the chat template is not valid: ")
    else:
        with pytest.raises(TemplateRefusal) as refused:
            template.render(_MESSAGES, ask=False)
        assert 0 < len(str(refused.value)) <= 300 and "\n" not in str(refused.value)
    assert time.monotonic() - start < 30
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGALRM) == handler


@pytest.mark.parametrize(
    "text",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000],
)
def test_a_template_that_no_compiler_takes_is_not_valid(text: str) -> None:
    with pytest.raises(DataError, match=r"^the chat template is not valid: "):
        ChatTemplate(text, {})


def test_work_within_its_budget_leaves_no_trace() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 50)
    with budget(10, 1 << 30):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 10
    assert 40 < signal.setitimer(signal.ITIMER_REAL, *before)[0] <= 50
    with pytest.raises(OverBudget), budget(0.01, 1 << 30):
        time.sleep(10)
    thread = threading.Thread(target=lambda: budget(1, 1).__enter__())
    thread.start()
    thread.join()


def test_a_role_is_one_line() -> None:
    for role in ("user\n", "us\rer", "", "a\u2028b"):
        document = {"messages": [{"role": role, "content": "x"}]}
        with pytest.raises(BadLine, match="the role of message 1 is not one line"):
            read_chat(document)
