"""Bad input is refused with one line and exit code 2, before PyTorch is even imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp.train import preflight
from megatron.dpp.train.fields import core_fields, read_dataclasses

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "datasets_gpt"
VOCABULARY = f"--vocab-file {DATA}/vocab.json --merge-file {DATA}/merges.txt"
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 1 --eval-iters 0 "
    "--transformer-impl local --device cpu"
)
GOOD = f"{MODEL} {VOCABULARY} --mock-data"
REFUSED = {
    "unknown flag --no-such-flag": f"{GOOD} --no-such-flag",
    "--num-layers 8 is not divisible by": f"{GOOD} --pipeline-model-parallel-size 3",
    "4 layers per pipeline rank are not divisible by": (
        f"{GOOD} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    ),
    "--num-virtual-stages-per-pipeline-rank 16": (
        f"{GOOD} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 16"
    ),
    "6 processes cannot hold": f"{GOOD} --tensor-model-parallel-size 4",
    "/nowhere/corpus.idx: no such file": f"{MODEL} {VOCABULARY} --data-path /nowhere/corpus",
    "/nowhere/b.idx: no such file": f"{MODEL} {VOCABULARY} --train-data-path 1 /nowhere/b",
    "/nowhere/vocab.json": (
        f"{MODEL} --mock-data --vocab-file /nowhere/vocab.json --merge-file /nowhere/merges.txt"
    ),
    "--dpp-transport pigeon": f"{GOOD} --use-dpp --dpp-transport pigeon",
    "--node-ips 10.0.0.1,10.0.0.2,10.0.0.3 has 3 addresses": (
        f"{GOOD} --use-dpp --node-ips 10.0.0.1,10.0.0.2,10.0.0.3"
    ),
}
WITHOUT_TORCH = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch" or name.startswith("megatron.core"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def pretrain(flags: str) -> subprocess.CompletedProcess[str]:
    world_size = "6" if "--tensor" in flags or "size 3" in flags else "2"
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "pretrain_gpt.py"), *flags.split()],
        env={**os.environ, "WORLD_SIZE": world_size, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_without_importing_torch(message: str) -> None:
    result = pretrain(REFUSED[message])
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_good_input_gets_as_far_as_torch() -> None:
    assert "AssertionError: torch" in pretrain(GOOD).stderr


def test_the_table_of_fields_is_that_of_the_pinned_megatron_core() -> None:
    assert core_fields() == read_dataclasses()


def run_in_process(flags: str, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    preflight.check("gpt", f"{GOOD} {flags}".split(), 4)


def test_two_nodes_must_not_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process("--use-dpp --multi-node --node-ips 10.0.0.1,10.0.0.2", "2", monkeypatch)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 stands for node 0 and node 1"):
        run_in_process("--use-dpp --node-ips 10.0.0.1,10.0.0.1", "2", monkeypatch)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 stands for node 0 and node 1"):
        words = "10.0.0.1,10.0.0.2,10.0.0.1,10.0.0.2"
        run_in_process(f"--use-dpp --node-ips {words}", "2", monkeypatch)


def test_several_nodes_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--multi-node: all 4 processes are on this node"):
        run_in_process("--multi-node", "4", monkeypatch)
