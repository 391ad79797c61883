"""The one command: its table, its help, and names that are misspelt."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.__main__ import COMMANDS
from megatron.dpp.__main__ import main as command

SCREEN = 43


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_screen(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if name in ("run", "train"):
        assert command([name, "--help"]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            command([name, "--help"])
        assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"megatron-dpp {name}" in lines[0]
    assert len(lines) <= SCREEN
    assert re.search(r"docs/\w+\.md", lines[-1]), "where the rest is"


@pytest.mark.parametrize("word", ["reprot", "trian"])
def test_an_unknown_name_is_met_with_the_nearest(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(word.split()) != 0
    assert "(did you mean " in capsys.readouterr().err
