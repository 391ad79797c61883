"""The one command: its table, its help, and the doors that users type."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.__main__ import COMMANDS
from megatron.dpp.__main__ import main as command

ROOT = Path(__file__).resolve().parents[2]
SCREEN = 43
DOORS = {
    "aggregate": "profiling/aggregate.py",
    "preprocess": "tools/preprocess_data.py",
}


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


@pytest.mark.parametrize("name", DOORS)
def test_a_door_takes_the_options_of_its_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command([name, "--help"])
    door = ROOT / DOORS[name]
    done = subprocess.run(
        [sys.executable, str(door), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == capsys.readouterr().out.replace(f"megatron-dpp {name}", door.name)


@pytest.mark.parametrize("word", ["reprot", "trian"])
def test_an_unknown_name_is_met_with_the_nearest(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(word.split()) != 0
    assert "(did you mean " in capsys.readouterr().err
