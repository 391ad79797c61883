"""The file in which a launcher hands checked settings to its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError, DataError, program
from megatron.dpp_train.loop.pretrain import main
from megatron.dpp_train.options import run_file
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate import validate
from tests.options.test_arguments import MINIMUM

MORE = (
    "--bf16 --window-size 8,0 --no-rope-freq ([0]*3+[1])*2 --profile-ranks 0 1 --lr 1e-3 "
    "--high-priority-stream-groups tp --use-dpp --dpp-activation-cap all"
)


@pytest.fixture
def config() -> RunConfig:
    return validate(parse_args([*MINIMUM.split(), *MORE.split()]), 2, "gpt")


def test_ranks_read_what_was_written(config: RunConfig, tmp_path: Path) -> None:
    path = run_file.write(config, "gpt", tmp_path / "run.json")
    again = run_file.read(str(path), "gpt", 2)
    assert {name: repr(value) for name, value in vars(again).items()} == {
        name: repr(value) for name, value in vars(config).items()
    }
    assert (again.given, again.parsed, again.dpp) == (config.given, config.parsed, config.dpp)
    assert run_file.read(run_file.in_memory(config, "gpt"), "gpt", 2).parsed == config.parsed


def test_a_file_of_another_run_is_refused(config: RunConfig, tmp_path: Path) -> None:
    path = str(run_file.write(config, "gpt", tmp_path / "run.json"))
    with pytest.raises(ConfigError, match=r"settings of pretrain_gpt\.py"):
        run_file.read(path, "bert", 2)
    with pytest.raises(ConfigError, match="settings of 2 processes, and 4 run"):
        run_file.read(path, "gpt", 4)
    for text in ("{", "[]", json.dumps({"task": "gpt"})):
        Path(path).write_text(text)
        with pytest.raises(DataError, match=r"--run-config .*: no settings of a run"):
            run_file.read(path, "gpt", 2)


def test_no_flag_goes_with_the_file(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run_file.write(config, "gpt", tmp_path / "run.json"))
    for words in (["--run-config", path, "--lr", "1"], ["--lr", "--run-config", path]):
        assert main("gpt", words) == 2
        assert capsys.readouterr().err.startswith(
            f"{program()}: error: --run-config FILE holds all settings"
        )
