"""The scripts that the documentation tells to run start from a clone, without an installation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path
    for folder in ("profiling", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_the_package_beside_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    imported = re.search(r"^(from|import) megatron", text, re.MULTILINE)
    found = re.search(r"^(sys\.path\.insert\(0, |import harness)", text, re.MULTILINE)
    assert imported is None or (found is not None and found.start() < imported.start())
