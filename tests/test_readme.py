"""README.md and docs/flags.md agree with the tree and with ``DppConfig``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.dpp.command_line import flag_of
from megatron.dpp.config import DppConfig, option_fields

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAGS = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """Flag -> default, as the first table of docs/flags.md shows it."""
    section = FLAGS.split("## Dynamic pipeline and transport")[1].split("\n## ")[0]
    cells = [line.split("|") for line in section.splitlines() if line.startswith("| `--")]
    return {cell[1].split("`")[1]: cell[2].strip().strip("`") for cell in cells}


@pytest.mark.parametrize("field", option_fields(), ids=lambda field: field.name)
def test_every_setting_is_in_the_flag_table(field: object) -> None:
    name: str = field.name  # type: ignore[attr-defined]
    default = getattr(DppConfig(), name)
    words = {"True": "on", "False": "off", "None": ""}
    shown = words.get(str(default), str(default))
    cell = rows()[flag_of(name)]
    assert cell == shown or float(cell) == float(shown)


def test_the_flag_table_has_no_other_flag() -> None:
    assert set(rows()) == {flag_of(field.name) for field in option_fields()}


def test_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_tree_of_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("## Files")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        folder = ROOT / "megatron" / "dpp" if line.startswith("  ") else ROOT
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            assert list(folder.glob(name.rstrip("/"))), name
