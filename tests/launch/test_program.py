"""Runs that a Python program starts."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError, DataError, DppError
from megatron.dpp_train import RunConfig, run
from megatron.dpp_train.launch import program
from megatron.dpp_train.options.arguments import parse_args
from tests.conftest import REPOSITORY

SMALL = RunConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, max_position_embeddings=16,
    micro_batch_size=1, global_batch_size=2, train_iters=2, lr=1e-3, eval_iters=0, mock_data=True,
    tokenizer_type="NullTokenizer", vocab_size=127, transformer_impl="local", device="cpu",
    log_interval=1,
)  # fmt: skip


def test_a_program_trains_and_finds_what_a_run_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = run(SMALL, directory=tmp_path / "run")
    assert len((home / "metrics.jsonl").read_text().splitlines()) == 3
    log = (home / "train.log").read_text()
    assert "iteration        2/       2" in log and log == capsys.readouterr().out
    again = parse_args(["--yaml-cfg", str(home / "settings.yaml")])
    assert (again.num_layers, again.lr, again.device) == (2, 1e-3, "cpu")
    with pytest.raises(DataError, match="of an earlier run is there"):
        run(SMALL, directory=tmp_path / "run")


def test_what_cannot_work_is_refused_before_any_process(tmp_path: Path) -> None:
    for config, text in (
        (SMALL.with_(global_batch_size=3, micro_batch_size=2), "--global-batch-size 3 is not"),
        (SMALL.with_(num_layers="2"), "num_layers='2': expected int"),
        (SMALL.with_(optimizer="lion"), "optimizer='lion': expected one of adam, sgd"),
        (SMALL.with_(bf16=1), "bf16=1: expected bool"),
        (SMALL.with_(seed=True), "seed=True: expected int"),
        (SMALL.with_(profile_ranks=("0",)), "profile_ranks=.*: expected int"),
        (SMALL.with_(packing="ffd"), "--packing needs --sft or --variable-length"),
    ):
        with pytest.raises(ConfigError, match=text):
            run(config, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SCRIPT = """
import importlib.util, json, random
torch = importlib.util.find_spec("torch")
assert "of the user" not in open(torch.origin).read()
raise SystemExit("the loss is no number")
"""
"""A script that fails; torchrun itself has imported PyTorch."""


def test_a_training_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own one: modules of the working directory hide no package. A random.py or a folder torch
    there ended torchrun with a traceback.
    """
    if sys.version_info >= (3, 11):  # Python 3.10 knows no PYTHONSAFEPATH
        (tmp_path / "torch").mkdir()
        for name in ("random.py", "json.py", "torch/__init__.py"):
            (tmp_path / name).write_text("raise SystemExit('of the user')")
    script = tmp_path / "of" / "pretrain_gpt.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    monkeypatch.setattr(program, "ROOT", script.parent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DppError, match=rf"the run in {tmp_path}/run ended with exit code 1"):
        run(SMALL, directory=tmp_path / "run")
    assert "the loss is no number" in (tmp_path / "run" / "train.log").read_text()


def test_the_example_is_one_of_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    path = REPOSITORY / "examples" / "run_config.py"
    started: list[tuple[RunConfig, int]] = []

    def note(config: RunConfig, processes: int) -> Path:
        started.append((config, processes))
        return Path("home")

    monkeypatch.setattr("megatron.dpp_train.launch.program.run", note)
    runpy.run_path(str(path))
    assert started[0][0].use_dpp and started[0][1] == 2
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 12
