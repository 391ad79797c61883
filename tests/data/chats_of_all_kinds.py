"""Twenty chats that between them use all that chat templates know, and templates of our own."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def called(*arguments: Any, content: str | None = None) -> Message:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "rain", "arguments": each}}
        for n, each in enumerate(arguments)
    ]
    return answer(content, tool_calls=calls)


def result(content: str, number: int = 0) -> Message:
    return {"role": "tool", "name": "rain", "tool_call_id": f"call0000{number}", "content": content}


ARGUMENTS = {"town": "Łódź", "day": 1, "note": "it's <b>"}
_PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": 'a <town> & "its" ZIP'}},
    "required": ["town"],
}
_FUNCTION = {"name": "rain", "description": "Näxt rain.", "parameters": _PARAMETERS}
TOOLS = [{"type": "function", "function": _FUNCTION}]

CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("Who is Ada?"), answer("A baker.")]},
    "two turns": {"messages": [user("Who?"), answer("Ada."), user("Why?"), answer("Bread.")]},
    "three turns": {
        "messages": [*[user("Who?"), answer("Ada.")] * 2, user("What?"), answer("Rye.")]
    },
    "system": {"messages": [system("Be terse."), user("Who?"), answer("Ada.")]},
    "system, two turns": {
        "messages": [system("Be terse."), user("A?"), answer("B."), user("C?"), answer("D.")]
    },
    "unicode": {"messages": [user("Łódź? 日本語 🙂"), answer("Ja, natürlich 🙂\u200d — 100 %.")]},
    "markup": {"messages": [user("<b>a</b> & 'b' \"c\""), answer("{{ x }} {% y %} <i>&amp;</i>")]},
    "white space": {"messages": [user("  a \n\n b\t"), answer("\n\n  c\n\n\n  d ")]},
    "lines": {"messages": [user("List."), answer("1. a\n2. b\n\n```python\nx = {1: 2}\n```\n")]},
    "numbers": {"messages": [user("1234567?"), answer("-1.5e10, 0x1F, 1,000,000")]},
    "thinking in the text": {
        "messages": [user("Who?"), answer("<think>\nHm.\n</think>\n\nAda."), user("Why?"),
                     answer("<think>\nHm, hm.\n</think>\n\nBread.")],
    },
    "reasoning": {
        "messages": [user("Who?"), answer("Ada.", reasoning_content="Hm."), user("Why?"),
                     answer("Bread.", reasoning_content="Hm, hm.")],
    },
    "thinking": {"messages": [user("Who?"), answer("Ada.", thinking="Hm.")]},
    "without thinking": {
        "messages": [user("Who?"), answer("Ada.")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "tools, unused": {"messages": [user("Who?"), answer("Ada.")], "tools": TOOLS},
    "a call": {
        "messages": [user("Rain?"), called(ARGUMENTS), result('{"mm": 3.5}'), answer("3.5 mm.")],
        "tools": TOOLS,
    },
    "a call and words": {
        "messages": [system("Call."), user("Rain?"), called(ARGUMENTS, content="I look."),
                     result("no"), answer("None."), user("Sure?"), answer("Yes.")],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [user("Rain?"), called(ARGUMENTS, {"town": "Köln"}), result("1"),
                     result("2", 1), answer("1 and 2.")],
        "tools": TOOLS,
    },
    "a call at the end": {"messages": [user("Rain?"), called(ARGUMENTS)], "tools": TOOLS},
    "parts": {
        "messages": [user([{"type": "text", "text": "Who?"}]),
                     answer([{"type": "text", "text": "Ada."}])],
    },
}  # fmt: skip

_LOOP = "{% for m in messages %}<|start|>{{ m.role }}\n"
_ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TEMPLATES = {
    "plain": f"{_LOOP}{{{{ m.content }}}}<|end|>\n{{% endfor %}}{_ASK}",
    "json": (
        "{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}"
        + _LOOP
        + "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>"
        "{% endfor %}" + _ASK
    ),
    "each argument": (
        "{{ tools | tojson if tools else '' }}" + _LOOP + "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
        "<{{ k }}>{{ v if v is string else v | tojson }}{% endfor %}{% endfor %}<|end|>"
        "{% endfor %}" + _ASK
    ),
    "answers marked": (
        "{{ tools | tojson if tools else '' }}" + _LOOP + "{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + _ASK
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index > 9 %}{% break %}{% endif %}[{{ m.role }}]{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "date": f"{{{{ strftime_now('%Y') }}}}{_LOOP}{{{{ m.content }}}}<|end|>{{% endfor %}}{_ASK}",
    "namespace": (
        "{% set ns = namespace(n=0, d=dict(a=1)) %}" + _LOOP + "{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }} {{ m.content | trim }}<|end|>{% endfor %}" + _ASK
    ),
    "blocks": (
        "{%- for m in messages -%}\n    {%- if true %}\n  [{{ m.role }}]\n    {% endif %}\n"
        "{{ m.content }}<|end|>\n{% endfor %}\n{% if add_generation_prompt %}  [assistant]\n"
        "{% endif %}"
    ),
    "parts alone": (
        _LOOP + "{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>{% endfor %}" + _ASK
    ),
    "earlier thinking dropped": (
        _LOOP + "{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|end|>\n"
        "{% endfor %}" + _ASK
    ),
    "an end to all": (
        f"{_LOOP}{{{{ m.content }}}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "asks to think": (
        f"{_LOOP}{{{{ m.content }}}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    ),
    "refuses a system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        f"{_LOOP}{{{{ m.content }}}}<|end|>{{% endfor %}}{_ASK}"
    ),
    "reasoning": (
        _LOOP + "{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}"
        "{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}" + _ASK
    ),
    "macro": (
        "{% macro turn(m) %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endmacro %}"
        "{{ bos_token }}{% for m in messages %}{{ turn(m) }}{% endfor %}" + _ASK
    ),
}
"""A template for each feature of Jinja and of transformers that templates use."""
