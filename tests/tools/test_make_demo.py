"""The animated transcript of the README."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_demo  # noqa: E402


def test_the_picture_shows_its_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ROOT / "docs" / "images"
    made = tmp_path / "demo.svg"
    monkeypatch.setattr(sys, "argv", ["make_demo.py", str(images / "demo.txt"), str(made)])
    assert make_demo.main() == 0
    assert made.read_text() == (images / "demo.svg").read_text()
    ET.fromstring(made.read_text())


def test_lines_are_typed_wait_and_appear_in_turn() -> None:
    typed, shown, last = make_demo.lines_of("$ ls\na & b\n~ 2\nend\n")
    assert typed.begin < typed.end < shown.begin == shown.end
    assert last.begin - shown.end > 2 and "a &amp; b" in make_demo.drawn([typed, shown, last])
