"""Texts and syntax trees of the repository's files, read once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def text_of(name: str) -> str:
    """The text of a file, by its path from the repository's root."""
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tree_of(name: str) -> ast.Module:
    """The syntax tree of a Python file. Garbage collection passes over its nodes: it takes twice as
    long as reading them."""
    gc.disable()
    try:
        return ast.parse(text_of(name))
    finally:
        gc.freeze()
        gc.enable()
