"""Bad input is refused with one line and exit code 2, before PyTorch is even imported."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.schedule import DecisionRecorder, Geometry
from megatron.dpp_train.options.core_fields import read_dataclasses
from megatron.dpp_train.options.fields import core_fields
from megatron.dpp_train.preflight import check as preflight
from tests.cost.test_planner import measured

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
    "--dpp-policy fastest": f"{GOOD} --use-dpp --dpp-policy fastest",
    "--dpp-activation-cap: 0.1p whole-model activations is 0.2": (
        f"{GOOD} --use-dpp --pipeline-model-parallel-size 2 --dpp-activation-cap 0.1p"
    ),
    "--dpp-inject jiter:0.3: expected": f"{GOOD} --use-dpp --dpp-inject jiter:0.3",
    "--dpp-replay /nowhere/order.rank0: No such file": (
        f"{GOOD} --use-dpp --dpp-replay /nowhere/order"
    ),
    "--dpp-record /nowhere/order: /nowhere is no directory": (
        f"{GOOD} --use-dpp --dpp-record /nowhere/order"
    ),
    "--dpp-plan shapes plans the dynamic pipeline": (
        f"{GOOD} --pipeline-model-parallel-size 2 --dpp-plan shapes"
    ),
    "--dpp-plan shapes does not go with --num-virtual-stages-per-pipeline-rank": (
        f"{GOOD} --pipeline-model-parallel-size 2 --dpp-plan shapes --use-dpp "
        "--num-virtual-stages-per-pipeline-rank 2"
    ),
    "--sft and --variable-length exclude": f"{GOOD} --sft --variable-length",
    "--order needs --sft or --variable-length": f"{GOOD} --order ascending",
    "do not go with --mock-data": f"{GOOD} --variable-length",
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
        env={
            **os.environ,
            "WORLD_SIZE": world_size,
            "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_without_importing_torch(message: str) -> None:
    result = pretrain(REFUSED[message])
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_good_input_gets_as_far_as_torch() -> None:
    assert "AssertionError: torch" in pretrain(GOOD).stderr


def test_a_link_kind_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flags = [*GOOD.split(), "--dpp-transport", "nixl"]
    with pytest.raises(ConfigError, match=r"--dpp-transport nixl: .*pip install --no-deps nixl"):
        preflight.check("gpt", flags, 2)


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


def test_each_replicas_recording_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = str(tmp_path / "order")
    flags = f"--use-dpp --dpp-replay {order} --pipeline-model-parallel-size 2 --global-batch-size "
    for rank in range(2):
        geometry = Geometry(2, rank, 1, 4)
        with DecisionRecorder(order, geometry) as recorder:
            recorder.write(geometry, [], split_backward=True)
    with pytest.raises(DataError, match=r"order\.replica1\.rank0: No such file"):
        run_in_process(f"{flags} 16", "4", monkeypatch)
    for rank in range(2):
        shutil.copy(f"{order}.rank{rank}", f"{order}.replica1.rank{rank}")
    run_in_process(f"{flags} 16", "4", monkeypatch)
    with pytest.raises(DataError, match="num_microbatches was 4 and is 8"):
        run_in_process(f"{flags} 32", "4", monkeypatch)
    run_in_process(f"{flags} 32", "2", monkeypatch)  # two nodes: each rank looks for itself


EXPERTS = (
    "--use-dpp --pipeline-model-parallel-size 2 --num-experts 4 --disable-bias-linear "
    "--expert-model-parallel-size 2 --global-batch-size 16"
)


def test_replicas_that_share_experts_replay_one_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = str(tmp_path / "order")
    for rank in range(2):
        with DecisionRecorder(order, Geometry(2, rank, 1, 4)) as recorder:
            recorder.write(Geometry(2, rank, 1, 4), [], split_backward=True)
    run_in_process(f"{EXPERTS} --dpp-replay {order}", "4", monkeypatch)


def test_several_nodes_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--multi-node: all 4 processes are on this node"):
        run_in_process("--multi-node", "4", monkeypatch)


def planned(*flags: str) -> argparse.Namespace:
    """Arguments of four ranks with a head as large as 2.5 layers."""
    model = (
        f"{GOOD} --pipeline-model-parallel-size 4 --use-dpp --micro-batch-size 1 "
        "--global-batch-size 8 --hidden-size 2048 --padded-vocab-size 30720 "
        "--seq-length 2048 --max-position-embeddings 2048"
    )
    return preflight.check("gpt", [*model.split(), *flags], 4)[0]


def test_a_planned_layout_counts_the_head() -> None:
    pytest.importorskip("megatron.core")
    args = planned("--num-layers", "14", "--dpp-plan", "shapes")  # no multiple of four
    layers = [stage.count("t") for stage in args.pipeline_model_parallel_layout.split("|")]
    assert sum(layers) == 14
    ranks = [sum(layers[rank::4]) for rank in range(4)]
    assert ranks[3] < min(ranks[:3])
    chunks = len(layers) // 4
    assert args.virtual_pipeline_model_parallel_size == (chunks if chunks > 1 else None)
    assert args.dpp_activation_cap != "auto"
    assert planned("--dpp-plan", "shapes", "--dpp-activation-cap", "2p").dpp_activation_cap == "2p"
    least = planned("--dpp-plan", "shapes", "--dpp-activation-cap", "1p")
    assert least.pipeline_model_parallel_layout.count("|") == 3  # two chunks would need more


def test_a_plan_from_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    costs = tmp_path / "costs.json"
    for stages, ranks, message in (
        (6, 6, "that run has 6 pipeline ranks"),
        (12, 4, "8 layers cannot be divided by 12 stages"),
    ):
        costs.write_text(json.dumps(measured([1] * stages, ranks, head=2.0)))
        with pytest.raises(ConfigError, match=message):
            planned("--num-layers", "8", "--dpp-plan", str(costs))
    costs.write_text(json.dumps(measured([3, 3, 3, 0], 4, head=2.0)))  # was itself planned
    with pytest.raises(DataError, match=r"another layout; --dpp-plan takes runs with the default"):
        planned("--num-layers", "8", "--dpp-plan", str(costs))
    with pytest.raises(ConfigError, match="each but the first and the last needs a layer, 2 in"):
        planned("--num-layers", "1", "--dpp-plan", "shapes")
    with pytest.raises(DataError, match="/nowhere"):
        planned("--dpp-plan", "/nowhere/run")


def test_a_plan_from_a_run_takes_its_times(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(measured([2] * 4, 4, head=3.0)))
    args = planned("--dpp-plan", str(costs), "--padded-vocab-size", "1536")
    layers = [stage.count("t") for stage in args.pipeline_model_parallel_layout.split("|")]
    assert sum(layers[3::4]) < 2


def test_a_shared_memory_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Data loaders ended with a traceback, and a run lost its steps at its first checkpoint."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm")
    why = r"/dev/shm is missing or cannot be written; 2 workers .*\(--num-workers 0: none\) need it"
    with pytest.raises(ConfigError, match=why):
        preflight.check("gpt", f"{GOOD} --num-workers 2".split(), 1)
    save = f"{GOOD} --num-workers 0 --save {tmp_path}/saved --save-interval 1"
    with pytest.raises(ConfigError, match=r"the writers of a checkpoint \(--ckpt-format torch"):
        preflight.check("gpt", save.split(), 1)
    assert preflight.check("gpt", f"{save} --ckpt-format torch".split(), 1)


def test_a_full_shared_memory_is_refused_before_workers_end_with_a_bus_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = SimpleNamespace(f_bavail=16, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    why = r"/dev/shm has 0\.06 MiB free, and 2 workers .*--num-workers 0 .*--shm-size"
    with pytest.raises(ConfigError, match=why):
        preflight.check("gpt", f"{GOOD} --num-workers 2".split(), 1)
    assert preflight.check("gpt", f"{GOOD} --num-workers 0".split(), 1)
    full.f_bavail = 2**20
    assert preflight.check("gpt", f"{GOOD} --num-workers 2".split(), 1)
