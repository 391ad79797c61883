"""No sentence of the packages that this project runs on stands in its own texts."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, tree_of

WORDS = 7
"""Words in a row that count as a sentence of somebody's."""
SHORT = 12
"""Letters below which such words are code or numbers."""


def windows(text: str) -> Iterator[str]:
    """Each run of :data:`WORDS` words of a text, in lower case."""
    words = re.findall(r"[a-z][a-z'-]*", text.lower())
    for start in range(len(words) - WORDS + 1):
        found = words[start : start + WORDS]
        if len(set(found)) == WORDS and sum(len(word) > 3 for word in found) >= 4:
            yield " ".join(found)


def texts(path: Path) -> Iterator[str]:
    """The string constants of a Python file."""
    for node in ast.walk(tree_of(path.relative_to(ROOT).as_posix())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_texts_are_the_projects_own() -> None:
    found = importlib.util.find_spec("megatron.training")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("megatron-core has its training loop for Python 3.12 on")
    theirs: set[str] = set()
    for path in Path(next(iter(found.submodule_search_locations))).rglob("*.py"):
        theirs.update(windows(path.read_text(encoding="utf-8")))
    assert len(theirs) > 10_000
    wrong = [
        f"{path.relative_to(ROOT)}: {window}"
        for path in (ROOT / "megatron").rglob("*.py")
        for text in texts(path)
        for window in windows(text)
        if window in theirs
    ]
    assert not wrong, "\n".join(wrong)
