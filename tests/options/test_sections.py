"""The typed settings: equal to the rows of flags, checked by mypy, frozen once they are checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp_train.options import write_sections
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig, Settings
from tests.conftest import REPOSITORY


def test_the_sections_are_those_of_the_rows() -> None:
    for section, fields in write_sections.fields_of_sections().items():
        path = write_sections.FOLDER / f"{section}.py"
        assert path.read_text() == write_sections.text_of(section, fields), (
            f"{section}: run python -m {write_sections.__name__}"
        )


def test_defaults_are_those_of_the_parser() -> None:
    def plain(settings: Settings) -> dict[str, object]:
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in vars(settings).items()}  # fmt: skip

    assert plain(Settings()) == plain(parse_args([]))


def test_settings_have_no_other_names() -> None:
    with pytest.raises(TypeError, match="RunConfig has no setting 'num_layrs'"):
        RunConfig(num_layrs=2)
    config = RunConfig(num_layers=2)
    assert (config.num_layers, config.lr, config.given) == (2, None, {})
    with pytest.raises(AttributeError, match=r"num_layers: checked settings are frozen"):
        config.num_layers = 3  # type: ignore[misc]
    assert (config.with_(num_layers=3).num_layers, config.num_layers) == (3, 2)
    draft = config.draft()
    draft.num_layers = 4
    assert config.num_layers == 2


INVENTED = """
from MODULE import RunConfig
config = RunConfig(num_layers=2, num_layrs=2)
config.num_layers + config.hiden_size
config.num_layers = 3
"""


def test_mypy_knows_every_setting(tmp_path: Path) -> None:
    """It refuses an invented field, in reading and in writing, and a change of a frozen one."""
    path = tmp_path / "invented.py"
    path.write_text(INVENTED.replace("MODULE", RunConfig.__module__))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(path)],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    for text in ('argument "num_layrs"', 'no attribute "hiden_size"', "is read-only"):
        assert text in ran.stdout, ran.stdout
    assert ran.stdout.count("error:") == 3, ran.stdout
