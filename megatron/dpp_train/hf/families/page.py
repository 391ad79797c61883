"""Writes the tables of families into their page of the documentation.

Run ``python -m megatron.dpp_train.hf.families.page`` after a family was added or changed. A test
compares the page with the tables.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family
from megatron.dpp_train.hf.families.left_out import LEFT_OUT
from megatron.dpp_train.hf.families.registry import find_families

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"
_BEGIN = "<!-- written by python -m megatron.dpp_train.hf.families.page -->\n"
_END = "<!-- end of what is written -->\n"


def tables() -> str:
    """The families of this package, then those that are left out."""
    lines = ["| `model_type` | models | flags beyond Llama's |", "|---|---|---|"]
    for family in find_families().values():
        lines.append(f"| `{family}` | {family.models} | {', '.join(_further(family))} |")
    lines += ["", "These are refused, with the reason:", ""]
    lines += ["| `model_type` | reason |", "|---|---|"]
    for reason, pairs in itertools.groupby(LEFT_OUT.items(), lambda pair: pair[1]):
        names = ", ".join(f"`{name}`" for name, _ in pairs)
        lines.append(f"| {names} | {reason} |")
    return "\n".join(lines) + "\n"


def _further(family: Family) -> list[str]:
    """Flags that Llama's models do not have, as words."""
    usual = parts.FLAGS | parts.EXPERT_FLAGS
    given = {name: value for name, value in family.flags.items() if usual.get(name) != value}
    words = [
        f"`--{name}`" if value is True else f"`--{name} {value}`" for name, value in given.items()
    ]
    named = sorted(set(family.fields.values()) - set(parts.FIELDS.values()))
    return [*words, *(f"`--{flag}`" for flag in named)]


def written(page: str) -> str:
    """A page with the tables of today.

    Raises:
        ValueError: it has no place for them.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: has no place for the tables")
    return f"{before}{begin}\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
