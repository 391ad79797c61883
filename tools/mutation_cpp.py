"""Faults of C++ files for ``mutation_test.py``, and the build of the extension with one.

Places are found by patterns, in the text without comments, strings and directives. Operators have
spaces around them (clang-format), which tells them from templates, pointers and references.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SUFFIXES = (".cc", ".h")
_UNREAD = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ ]*#[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_OTHER = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "/", "/": "*", "%": "/", "+=": "-=", "-=": "+=", "&&": "||", "||": "&&", "++": "--",
    "--": "++", "true": "false", "false": "true", "std::min": "std::max", "std::max": "std::min",
}  # fmt: skip
_TARGET = r"\*?[\w.\->:\[\]()]+"
_FAULTS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("operator", r"(?<= )(?:[<>]=?|[=!]=|[+\-]=?|[*/%]|&&|\|\|)(?= )", _OTHER.__getitem__),
    ("step", r"\+\+|--", _OTHER.__getitem__),
    ("truth", r"\b(?:true|false)\b", _OTHER.__getitem__),
    ("bound", r"std::(?:min|max)\b", _OTHER.__getitem__),
    ("number", r"(?<![\w.'])\d+(?![\w.'])", lambda found: str(int(found) + 1)),
    ("condition", r"(?<=\bif )\([^;{}]*?\)(?= [\w{*+(]|\n)", lambda found: f"(!{found})"),
    ("statement", rf"(?m)(?<=  )(?:{_TARGET}(?: [|+\-]?= [^;\n]+)?|(?:\+\+|--){_TARGET}"
     r"|[\w.\->:\[\]]+\([^;\n]*\))(?=;$)", lambda _: ""),
)  # fmt: skip
_KEPT = re.compile(r"(?:return|break|continue|else|case|default|using|throw|delete)\b")


def faults_of(text: str) -> Iterator[tuple[str, int, int, str]]:
    """All faults of a C++ text: a name, the first and last offset of the place, and what is there
    instead."""
    bare = _UNREAD.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for name, pattern, instead in _FAULTS:
        for found in re.finditer(pattern, bare):
            if found[0].count("(") != found[0].count(")") or _KEPT.match(found[0]):
                continue
            if name == "condition" and "const " in found[0]:
                continue  # it declares
            yield name, found.start(), found.end(), instead(text[found.start() : found.end()])


def build(folder: Path) -> bool:
    """Build the extension of a copy of the tree; False if the compiler refuses it. Compiles what
    reads a changed file only."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode and "error:" not in done.stderr:
        raise SystemExit(f"mutation_test: error: {' '.join(command)}: {done.stderr[-2000:]}")
    return done.returncode == 0
