"""What the README claims about the tree and the flags is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.dpp.config import DppConfig, flag_of, option_fields

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("field", option_fields(), ids=lambda field: field.name)
def test_every_setting_is_in_the_flag_table(field: object) -> None:
    flag = flag_of(field.name)  # type: ignore[attr-defined]
    row = next((line for line in README.splitlines() if line.startswith(f"| `{flag}`")), None)
    if flag == "--dpp-replay":
        row = next(line for line in README.splitlines() if line.startswith("| `--dpp-record`"))
    assert row is not None, f"{flag} has no row"
    default = getattr(DppConfig(), field.name)  # type: ignore[attr-defined]
    shown = {True: "on", False: "off", None: ""}.get(default, str(default))
    cell = row.split("|")[2].strip().strip("`")
    assert cell == shown or float(cell) == float(shown)


def test_links_and_paths_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    tree = README.split("## What is where")[1].split("```")[1]
    for line in tree.splitlines():
        for name in re.split(r"\s{2,}", line)[0].split():
            if not line.startswith("  "):
                assert list(ROOT.glob(name.rstrip("/"))), name
