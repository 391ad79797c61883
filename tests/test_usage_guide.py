"""The messages that docs/USAGE_GUIDE.md explains are messages of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PLACEHOLDER = r"\.\.\.|--\S+|\bDIR\b|\bN\b|\bnan\b|\d+%?|[^\w\s'-]"
"""What stands for a value in a message of the guide, and punctuation."""


def explained() -> list[str]:
    text = (ROOT / "docs" / "USAGE_GUIDE.md").read_text(encoding="utf-8")
    table = text[text.index("| message | what happened") :]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    found = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in found if not message.startswith("torch.")]


def words_of_the_code() -> str:
    """All sources with strings that go on in the next line joined."""
    paths = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "examples").glob("*.sh")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return re.sub(r'"\s*\\?\n\s*f?"', "", text)


@pytest.fixture(scope="module")
def code() -> str:
    return words_of_the_code()


@pytest.mark.parametrize("message", explained())
def test_a_message_is_one_of_the_code(message: str, code: str) -> None:
    parts = [part.strip() for part in re.split(_PLACEHOLDER, message)]
    parts = [part for part in parts if len(part.split()) > 1]
    assert parts
    assert [part for part in parts if part not in code] == []
