"""The commands of the earlier projects: each works, or says in one line what it is now."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.__main__ import main
from megatron.dpp_train.presets import flag_table
from tests.conftest import REPOSITORY
from tests.runtime.launcher import start, wait

DRY = (
    "bash run_single_gpt.sh",
    "bash run_single_bert.sh",
    "bash run_single.sh",
    "MASTER_ADDR=localhost bash run_master_gpt.sh",
    "MASTER_ADDR=localhost bash run_master_bert.sh",
    "MASTER_ADDR=localhost bash run_master.sh",
    "MASTER_ADDR=localhost NODE_RANK=1 bash run_worker_gpt.sh",
    "MASTER_ADDR=localhost NODE_RANK=1 bash run_worker_bert.sh",
    "MASTER_ADDR=localhost NODE_RANK=1 bash run_worker.sh",
    "GPUS_PER_NODE=4 bash examples/gpt3/train_gpt3_175b_distributed.sh",
    "GPUS_PER_NODE=4 bash examples/gpt3/train_gpt3_175b_distributed_master.sh",
    "GPUS_PER_NODE=4 MASTER_ADDR=h bash examples/gpt3/train_gpt3_175b_distributed_worker.sh",
    "GPUS_PER_NODE=4 bash examples/bert/train_bert_340m_distributed.sh",
    "GPUS_PER_NODE=4 bash examples/bert/train_bert_340m_distributed_master.sh",
    "GPUS_PER_NODE=4 MASTER_ADDR=h bash examples/bert/train_bert_340m_distributed_worker.sh",
    "NUM_GPUS=4 TP_SIZE=2 PP_SIZE=2 bash scripts/run_3d_parallel.sh",
    "NUM_GPUS=2 PP_SIZE=2 bash scripts/run_megatron.sh",
    "NUM_GPUS=2 ZERO_STAGE=2 bash scripts/run_deepspeed.sh",
    "NUM_GPUS=4 TP_SIZE=2 PP_SIZE=2 NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=h "
    "bash scripts/run_multinode.sh",
    "python train --mode simple --model small --batch-size 32 --max-steps 1000 --lr 1e-4",
    "python train --mode 3d --num-gpus 8 --gpu H100 --tp 2 --pp 2 --model medium --fp16",
    "python train --mode megatron --procs 2 --tensor-model-parallel-size 2 --trace",
    "python train --mode deepspeed --procs 2 --zero-stage 2 --model small",
    "python train --mode auto --procs 2",
    "./train --mode 3d --procs 2 --pp 2 --multi-node --trace-granularity full",
)
"""Commands that print the torchrun which they would become."""
WHOLE = (DRY[0], DRY[1], DRY[-1])
"""Commands that are run as they are; of the others a copy, up to the words for megatron-dpp."""
HELP = (
    "python tools/preprocess_data.py --help",
    "python aggregate.py --help",
    "python profiling/aggregate.py --help",
    "bash tools/quick_test.sh --help",
)


def run(
    command: str, folder: Path = REPOSITORY, timeout: int = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """A command line as a user pastes it, with this Python and without GPUs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment | more,
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """Set-up has built what is missing, and read Megatron's flags."""
    assert run("bash tools/setup.sh", timeout=280).returncode == 0
    flag_table.table()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts beside a megatron-dpp that prints its words."""
    root = tmp_path_factory.mktemp("scripts")
    for name in ("examples", "scripts"):
        shutil.copytree(REPOSITORY / name, root / name, symlinks=True)
    for path in (*REPOSITORY.glob("run_*.sh"), REPOSITORY / "train"):
        shutil.copy(path, root)
    (root / "megatron-dpp").write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    (root / "megatron-dpp").chmod(0o755)
    return root


def check_torchrun(out: str) -> None:
    words = shlex.split(out.splitlines()[-1])
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert any(re.search(r"pretrain_(gpt|bert)\.py$", word) for word in words)


@pytest.mark.parametrize("command", WHOLE)
def test_a_command_prints_the_torchrun_that_it_becomes(command: str) -> None:
    done = run(command, DRY_RUN="1")
    assert done.returncode == 0 and not done.stderr, done.stderr
    check_torchrun(done.stdout)


@pytest.mark.parametrize("command", [each for each in DRY if each not in WHOLE])
def test_a_script_hands_on_the_words_of_a_run(
    command: str,
    scripts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run(command, scripts)
    assert done.returncode == 0 and not done.stderr, done.stderr
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in re.findall(r"([A-Z_]+)=(\S+)", command):
        monkeypatch.setenv(name, value)
    assert main(done.stdout.split("\0")[:-1]) == 0
    out, err = capsys.readouterr()
    assert not err
    check_torchrun(out)


@pytest.mark.parametrize("command", HELP)
def test_a_tool_answers(command: str) -> None:
    done = run(command)
    assert done.returncode == 0 and done.stdout


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_training_script_answers(script: str) -> None:
    (done,) = wait(start(REPOSITORY / script, 1, ["--help"], preload="training"), 120)
    assert done.returncode == 0 and "--num-layers" in done.output


def test_every_earlier_file_is_there() -> None:
    names = """prerequisite.sh prerequisites.sh configs/models/small.yaml configs/models/medium.yaml
        configs/models/large.yaml datasets_gpt/dataset.json datasets_gpt/vocab.json
        datasets_gpt/merges.txt datasets_bert/dataset.json datasets_bert/vocab.txt
        tools/quick_test.sh tools/benchmark.sh docs/USAGE_GUIDE.md"""
    assert not [name for name in names.split() if not (REPOSITORY / name).is_file()]
