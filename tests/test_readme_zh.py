"""README_zh.md says what README.md says: the same commands, and tables with the same names and
numbers. Words are not compared; when this fails, bring the Chinese page up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "README_zh.md")


def blocks(page: str) -> list[list[str]]:
    """Lines of each fenced block without their comments and descriptions."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return [[_words(line) for line in block.splitlines()] for block in found]


def _words(line: str) -> str:
    """The line up to its comment, or to the description of a file in the tree."""
    line = re.sub(r"\s+#.*", "", line)
    return re.split(r"(?<=\S)\s{3,}", line)[0].rstrip()


def tables(page: str) -> list[list[tuple[list[str], list[str]]]]:
    """Per table, per row: what stands in backticks, and the numbers outside of links."""
    found: list[list[tuple[list[str], list[str]]]] = [[]]
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            found.append([])
            continue
        plain = re.sub(r"\]\([^)]*\)", "]", line)
        code = re.findall(r"`[^`]+`", plain)
        found[-1].append((sorted(code), sorted(re.findall(r"\d+(?:\.\d+)?", plain))))
    return [table for table in found if table]


def links(page: str) -> list[str]:
    """Targets of the page's links, without the page in the other language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\(([^)#]+)\)", text))
    return sorted(targets - set(PAGES))


@pytest.mark.parametrize("what", [blocks, tables, links])
def test_both_pages_have_the_same(what: object) -> None:
    english, chinese = (what(page) for page in PAGES)  # type: ignore[operator]
    assert english
    assert len(english) == len(chinese)
    for one, other in zip(english, chinese, strict=True):
        assert one == other


def test_headings_are_as_many() -> None:
    counts = [(ROOT / page).read_text(encoding="utf-8").count("\n## ") for page in PAGES]
    assert counts[0] == counts[1]
