"""Compares the size of each room with ``tools/budget.toml``: ``python tools/budget.py``.

Prints a table; the exit status is 1 where something is above its budget.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_TEXTS = ("docs", "*.md")


def files(*patterns: str) -> list[Path]:
    """Tracked files of git's patterns that exist; a pattern after ``!`` takes files out."""
    magic = {"!": ":(exclude)", "*": ":(glob)"}
    words = [
        magic["!"] + word[1:] if word[0] == "!" else magic["*"] * ("*" in word) + word
        for word in patterns
    ]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def lines(room: str) -> int:
    """Lines of Python of a room: paths and patterns, with spaces between them."""
    found = (path for path in files(*room.split()) if path.suffix == ".py")
    return sum(path.read_bytes().count(b"\n") for path in found)


def numbers() -> dict[str, int]:
    """The sizes of doors and of the documentation."""
    from megatron.dpp.__main__ import COMMANDS
    from megatron.dpp.config import option_fields

    texts = [path for path in files(*_TEXTS) if path.suffix == ".md" and not path.is_symlink()]
    return {
        "fields": len(option_fields()),
        "commands": len(COMMANDS),
        "pages": sum(path.is_relative_to(ROOT / "docs") for path in texts),
        "words": sum(len(path.read_text(encoding="utf-8").split()) for path in texts),
    }


def main() -> int:
    budget = tomllib.loads((ROOT / "tools" / "budget.toml").read_text(encoding="utf-8"))
    rows = [(room, lines(room), most) for room, most in budget["lines"].items()]
    found = numbers()
    rows += [(name, found[name], most) for name, most in budget["numbers"].items()]
    for name, size, most in rows:
        print(f"{size:7} of {most:6}  {name}{'  <-- above its budget' * (size > most)}")
    return int(any(size > most for _, size, most in rows))


if __name__ == "__main__":
    sys.exit(main())
