"""DeepSpeed's engine under our loop: megatron-core's losses, exact resuming, and refusals.

The package is no requirement; without it the runs are skipped, the refusals are not.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.launch.main import plan
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from tests.parity.runs import Result, train
from tests.runtime.launcher import REPOSITORY

STAGES = (1, 2, 3)
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--lr-decay-style constant --train-iters 4 --eval-iters 1 --eval-interval 100 --mock-data "
    "--weight-decay 0.1 --transformer-impl local --device cpu --num-workers 0 "
    f"--vocab-file {REPOSITORY}/datasets_gpt/vocab.json "
    f"--merge-file {REPOSITORY}/datasets_gpt/merges.txt "
)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def run(folder: Path, name: str, more: str) -> Result:
    return train(folder, name, 2, f"{FLAGS} {more}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """megatron-core's own numbers, with dropout, and a checkpoint in its form."""
    folder = tmp_path_factory.mktemp("megatron")
    return run(folder, "megatron", f"--save {folder}/ckpt --save-interval 4")


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_megatron_cores_and_a_run_resumes_bitwise(
    stage: int, tmp_path: Path, expected: Result
) -> None:
    flags = f"--deepspeed-zero-stage {stage} --save {tmp_path} --save-interval 2"
    whole = run(tmp_path, "whole", flags)
    assert whole.column("lm loss") == pytest.approx(expected.column("lm loss"), rel=1e-5)
    assert whole.column("grad norm") == pytest.approx(expected.column("grad norm"), rel=5e-4)
    assert whole.evaluations[0]["lm loss"] == pytest.approx(
        expected.evaluations[0]["lm loss"], rel=1e-5
    )
    files.write_tracker(tmp_path, 2)
    resumed = run(tmp_path, "resumed", f"--deepspeed-zero-stage {stage} --load {tmp_path}")
    assert resumed.column("lm loss") == whole.column("lm loss")[2:]
    assert resumed.hashes == whole.hashes


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, None)


@pytest.fixture
def with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, importlib.util.find_spec("json"))


def _pretend(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "deepspeed" else real(name)
    )


@pytest.mark.usefixtures("without_deepspeed")
def test_without_the_package_both_doors_say_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install deepspeed\); nearest .*--engine megatron"):
        plan(shlex.split("--mode zero --engine deepspeed --procs 2"))
    with pytest.raises(ConfigError, match="--deepspeed-zero-stage 2: DeepSpeed is not installed"):
        validate(parse_args(f"{FLAGS} --deepspeed-zero-stage 2".split()), world_size=2)


@pytest.mark.usefixtures("with_deepspeed")
def test_train_resolves_to_the_engines_flag() -> None:
    resolved = plan(shlex.split("--mode zero --zero-stage 3 --engine deepspeed --procs 2")).resolved
    assert resolved.flags["--deepspeed-zero-stage"] == 3
    assert not {"--use-torch-fsdp2", "--use-distributed-optimizer"} & set(resolved.flags)


@pytest.mark.usefixtures("with_deepspeed")
@pytest.mark.parametrize(
    "flag", ["--pipeline-model-parallel-size 2", "--use-torch-fsdp2", "--ckpt-format torch"]
)
def test_what_the_engine_does_not_go_with_is_named(flag: str) -> None:
    args = parse_args(f"{FLAGS} --deepspeed-zero-stage 1 {flag}".split())
    with pytest.raises(ConfigError, match=f"does not go with {flag.split()[0]}"):
        validate(args, world_size=2)


def _checkpoint(folder: Path, *names: str) -> files.Found:
    path = files.directory(folder, 3)
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"x")
    found = files.Found(path, 3)
    assert found.is_deepspeed
    return found


def test_a_checkpoint_of_the_engine_says_what_reads_it(tmp_path: Path) -> None:
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    found = _checkpoint(tmp_path, "mp_rank_00_model_states.pt", *ranks)
    files.check_engine(found, stage=2, replicas=2)
    with pytest.raises(DataError, match="add --deepspeed-zero-stage"):
        files.check_engine(found, stage=None, replicas=2)
    with pytest.raises(DataError, match="ranks 0, 1, but this run has 4"):
        files.check_engine(found, stage=2, replicas=4)
    with pytest.raises(DataError, match="stage 1 or 2, this run has 3"):
        files.check_engine(found, stage=3, replicas=2)
    (found.path / ranks[1]).write_bytes(b"")
    with pytest.raises(DataError, match=f"{ranks[1]}: empty"):
        files.check_engine(found, stage=2, replicas=2)
