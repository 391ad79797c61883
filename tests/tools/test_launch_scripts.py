"""The launch scripts: the commands that they print, and the settings that they refuse.

``DRY_RUN=1`` makes them print the commands; the flags in these are checked against the real parser.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.dpp.__main__ import main
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.launch import job, nodes, scripts
from megatron.dpp_train.launch.start import Data
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"gpt": "gpt3/train_gpt3_175b", "bert": "bert/train_bert_340m"}


def run(script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with nothing but PATH and ``settings`` in its environment, and no GPU."""
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", **settings}
    return subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


def dry_run(script: str, *arguments: str, **settings: str) -> list[str]:
    """The words of the command that ``script`` would end with."""
    result = run(script, *arguments, DRY_RUN="1", **settings)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


def flags_of(command: list[str]) -> Any:
    """The training script's part of a command, parsed; unknown flags raise."""
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return parse_args(command[script + 1 :])


def torchrun_part(command: list[str]) -> str:
    return " ".join(command[: next(i for i, word in enumerate(command) if word.endswith(".py"))])


class Started(Exception):
    """Raised instead of becoming torchrun."""


def unchecked(arch: str, parsed: Namespace, *_: int) -> tuple[RunConfig, None]:
    """Settings as a check would return them."""
    return parsed.frozen(), None


@pytest.mark.parametrize(
    ("flags", "given", "queues"),
    [
        ("", "", "8"),
        ("--tensor-model-parallel-size 2", "", "1"),
        ("--context-parallel-size 2", "", "1"),
        ("--tensor-model-parallel-size 2 --use-torch-fsdp2", "", "8"),
        ("--tensor-model-parallel-size 2", "3", "3"),
    ],
)
def test_hardware_queues(
    flags: str, given: str, queues: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []

    def become(python: str, words: list[str], env: dict[str, str]) -> None:
        started.append(env)
        raise Started

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr(job, "check_parsed", unchecked)
    monkeypatch.setattr(job, "make_home", lambda *_: tmp_path)
    monkeypatch.setattr(job, "copy_output", lambda log, lock: lock.close() or {})
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    monkeypatch.delenv("DRY_RUN", raising=False)
    with pytest.raises(Started):
        job.launch(job.Job(per_node=2), "python", "pretrain_gpt.py", flags.split())
    assert started[0]["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    assert started[0]["PYTHONPATH"].startswith(str(ROOT))


def test_an_interface_that_the_environment_names_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def become(python: str, words: list[str], env: dict[str, str]) -> None:
        raise Started(env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"])

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr(job, "check_parsed", unchecked)
    found = {"GLOO_SOCKET_IFNAME": "found", "NCCL_SOCKET_IFNAME": "=found"}
    monkeypatch.setattr(job, "meet", lambda _: found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("NCCL_SOCKET_IFNAME", "DRY_RUN", "RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Started) as started:
        job.launch(job.Job(per_node=2, num_nodes=2), "python", "pretrain_gpt.py", [])
    assert started.value.args == ("lo", "=found")


def test_a_script_of_ones_own_finds_the_modules_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the working directory, which may have Python's names, are left out."""

    def become(python: str, words: list[str], env: dict[str, str]) -> None:
        raise Started(env["PYTHONPATH"].split(":")[:2], env["PYTHONSAFEPATH"])

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr(job, "check_parsed", unchecked)
    monkeypatch.setattr(job, "meet", lambda _: {})
    for name in ("DRY_RUN", "RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Started) as started:
        job.launch(job.Job(per_node=2, num_nodes=2), "python", str(tmp_path / "my.py"), [])
    assert started.value.args == ([str(tmp_path), str(ROOT)], "1")


def test_a_script_with_flags_counts_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said GPUS_PER_NODE=found: must be a whole number."""
    monkeypatch.setattr(scripts, "set_up", lambda _: sys.executable)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "GPUS_PER_NODE": "", "DRY_RUN": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no GPU was found"):
        scripts.start(["flags", "pretrain_gpt.py"])
    for name, value in (("NUM_GPUS", "3"), ("CUDA_VISIBLE_DEVICES", "0,1,2")):
        monkeypatch.setenv(name, value)
        scripts.start(["flags", "pretrain_gpt.py"])
        assert "--nproc_per_node 3 " in capsys.readouterr().out
        monkeypatch.delenv("NUM_GPUS", raising=False)


@pytest.mark.parametrize(
    ("ips", "own"), [("a b c d e f", ["c", "d"]), ("a b c", ["b"]), ("", [])]
)  # fmt: skip
def test_a_node_takes_its_own_addresses(
    ips: str, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def interface(master: str, own: list[str]) -> tuple[str, str]:
        asked.append(list(own))
        return "10.0.0.2", "eth0"

    monkeypatch.setattr(job, "own_interface", interface)
    found = job.use_interface(job.Job(per_node=2, num_nodes=3, node_rank=1, ips=tuple(ips.split())))
    assert asked == [own]
    assert found["GLOO_SOCKET_IFNAME"] == "eth0" and ("NCCL_SOCKET_IFNAME" in found) == bool(ips)


def test_a_job_is_what_the_environment_says() -> None:
    alone = {"GPUS_PER_NODE": "3"}
    assert job.find_job(alone).port is None
    assert job.find_job({**alone, "MASTER_PORT": "7001"}).port == 7001
    with pytest.raises(ConfigError, match="NUM_NODES=1000000000000: at most"):
        job.find_job({**alone, "NUM_NODES": "1000000000000"})
    left = {**alone, "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "7001"}
    assert job.find_job(left).master == "localhost", "another program's, and nobody answers there"
    two = {**alone, "NUM_NODES": "2", "NODE_RANK": "1"}
    for count in (2, 6):
        ips = ",".join(f"10.0.0.{number}" for number in range(count))
        assert len(job.find_job({**two, "NODE_IPS": ips}).ips) == count
    for ips in ("10.0.0.1", "10.0.0.1,10.0.0.2,10.0.0.3"):
        with pytest.raises(ConfigError, match=r"expected one per node \(2\) or one per rank \(6\)"):
            job.find_job({**two, "NODE_IPS": ips})


def test_tasks_of_srun_on_one_node_do_not_each_start_a_run() -> None:
    slurm = {"SLURM_NNODES": "1", "SLURM_NTASKS": "8"}
    assert nodes.find_nodes(slurm).count == 1  # a batch script, or salloc
    step = {**slurm, "SLURM_STEP_NUM_TASKS": "8"}
    with pytest.raises(ConfigError, match=r"SLURM runs 8 tasks on this node.*srun --ntasks=1"):
        nodes.find_nodes(step)
    assert nodes.find_nodes({**step, "NUM_NODES": "1"}).count == 1
    assert nodes.find_nodes({**step, "SLURM_STEP_NUM_TASKS": "1"}).count == 1


def test_slurm_stands_in_for_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NTASKS": "16"}
    ours = {"NUM_NODES": "2", "MASTER_ADDR": "host"}
    found = nodes.find_nodes({**slurm, **ours})
    assert (found.count, found.rank, found.master) == (2, 1, "host")
    with pytest.raises(ConfigError, match="SLURM has 2 nodes and 16 tasks"):
        nodes.find_nodes({**slurm, "NODE_RANK": "1", "MASTER_ADDR": "host"})
    names = subprocess.CompletedProcess([], 0, "node-c\nnode-d\n")
    monkeypatch.setattr(nodes, "shutil", SimpleNamespace(which=lambda name: name))
    monkeypatch.setattr(nodes.subprocess, "run", lambda *_, **__: names)
    listed = {**slurm, "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node-[c-d]"}
    assert nodes.find_nodes(listed).master == "node-c"


@pytest.mark.parametrize(
    ("given", "layers", "chunks"),
    [
        ({"PIPELINE_PARALLEL": "1"}, 8, 1), ({"PIPELINE_PARALLEL": "2"}, 8, 2),
        ({"PIPELINE_PARALLEL": "3", "MODEL_CHUNKS": "1"}, 6, 1),
        ({"PIPELINE_PARALLEL": "4"}, 16, 2),
    ],
)  # fmt: skip
def test_a_sample_has_layers_for_every_stage(
    given: dict[str, str], layers: int, chunks: int
) -> None:
    found = scripts.sample_settings("gpt", given, 0)
    assert (int(found["NUM_LAYERS"]), int(found["MODEL_CHUNKS"])) == (layers, chunks)
    assert int(found["GLOBAL_BATCH_SIZE"]) == 16 * int(given["PIPELINE_PARALLEL"])


def test_an_empty_setting_is_not_set() -> None:
    found = scripts.settings_of("gpt", "node", {"GPUS_PER_NODE": "2", "LR": ""}, sample=False)
    assert found["LR"] == scripts.RECIPES["gpt"]["LR"] != ""


@pytest.mark.parametrize("model", MODELS)
def test_single_run_without_a_gpu(model: str) -> None:
    command = dry_run(f"run_single_{model}.sh")
    assert f"pretrain_{model}.py" in " ".join(command)
    assert "--nproc_per_node 4" in torchrun_part(command)
    args = flags_of(command)
    assert args.use_dpp
    assert args.trace
    assert not args.fp16
    assert not args.bf16
    assert args.pipeline_model_parallel_size * args.tensor_model_parallel_size == 4


def test_single_run_uses_all_gpus() -> None:
    command = dry_run("run_single_gpt.sh", CUDA_VISIBLE_DEVICES="0,1,2,3")
    args = flags_of(command)
    assert "--nproc_per_node 4" in torchrun_part(command)
    assert args.bf16
    assert args.pipeline_model_parallel_size == 4
    one = flags_of(dry_run("run_single_gpt.sh", CUDA_VISIBLE_DEVICES="0"))
    assert one.num_layers_per_virtual_pipeline_stage is None


@pytest.mark.parametrize("model", MODELS)
def test_the_published_configuration(model: str) -> None:
    script = f"examples/{MODELS[model]}_distributed.sh"
    args = flags_of(dry_run(script, GPUS_PER_NODE="4"))
    layout = (args.pipeline_model_parallel_size, args.tensor_model_parallel_size)
    assert layout == (2, 2)
    assert args.num_layers == 2 * 4 * args.num_layers_per_virtual_pipeline_stage
    assert args.num_layers == {"gpt": 16, "bert": 24}[model]
    assert args.fp16
    assert args.recompute_activations
    assert args.use_dpp
    assert args.initial_loss_scale <= 65536
    assert args.lr_decay_iters == args.train_iters


def test_settings_reach_the_command_and_arguments_follow() -> None:
    command = dry_run(
        "run_single_gpt.sh", "--log-throughput", "--lr", "0.5", USE_DPP="0", TRACE="0", LR="0.25"
    )
    args = flags_of(command)
    assert not args.use_dpp
    assert not args.trace
    assert args.log_throughput
    assert args.lr == 0.5


def test_paths_can_be_positional_as_in_megatron(tmp_path: Path) -> None:
    for name in ("vocab", "merges", "data.bin", "data.idx"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / name) for name in ("ckpt", "logs", "vocab", "merges", "data")]
    script = "examples/gpt3/train_gpt3_175b_distributed.sh"
    args = flags_of(dry_run(script, *paths, "--log-throughput", GPUS_PER_NODE="4"))
    assert [args.save, args.tensorboard_dir, args.vocab_file, args.merge_file] == paths[:4]
    assert args.data_path == paths[4:]
    result = run(script, *paths, "one-too-many", GPUS_PER_NODE="4", DRY_RUN="1")
    assert "unexpected argument 'one-too-many'" in result.stderr


def test_a_new_vocabulary_gets_new_token_files(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.json"
    vocab.write_text("{}")
    ours = flags_of(dry_run("run_single_gpt.sh")).data_path
    other = flags_of(dry_run("run_single_gpt.sh", VOCAB_FILE=str(vocab))).data_path
    assert ours != other


def test_the_sample_is_tokenised_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = tmp_path / "tokens", scripts.RECIPES["gpt"]
    words = ["-c", f"open({str(made)!r}, 'x')"]
    data = Data({"--data-path": str(made)}, words)
    monkeypatch.setattr(scripts, "prepare", lambda *_: data)
    assert scripts.sample_tokens("gpt", sizes, sys.executable) == [str(made)]
    assert made.exists()
    with pytest.raises(DataError, match="sample corpus could not be preprocessed"):
        scripts.sample_tokens("gpt", sizes, sys.executable)  # the file is there
    monkeypatch.setattr(scripts, "prepare", lambda *_: Data(data.flags, None))
    assert scripts.sample_tokens("gpt", sizes, sys.executable) == [str(made)]


REFUSED = {
    "4 processes cannot hold TENSOR_PARALLEL=2 x PIPELINE_PARALLEL=3": {"PIPELINE_PARALLEL": "3"},
    "TENSOR_PARALLEL=two: must be a whole number": {"TENSOR_PARALLEL": "two"},
    "4 processes cannot hold TENSOR_PARALLEL=8": {"TENSOR_PARALLEL": "8"},
    "NUM_LAYERS=6 is not divisible by PIPELINE_PARALLEL=2 x MODEL_CHUNKS=2": {"NUM_LAYERS": "6"},
    "MODEL_CHUNKS=8 x PIPELINE_PARALLEL=2 = 16 virtual stages; NUM_LAYERS is 8":
        {"MODEL_CHUNKS": "8", "NUM_LAYERS": "8"},
    "need PIPELINE_PARALLEL of at least 2": {"PIPELINE_PARALLEL": "1", "MODEL_CHUNKS": "2"},
    "HIDDEN_SIZE=130 is not divisible by NUM_ATTENTION_HEADS=4": {"HIDDEN_SIZE": "130"},
    "NUM_ATTENTION_HEADS=1 is not divisible by TENSOR_PARALLEL=2": {"NUM_ATTENTION_HEADS": "1"},
    "GLOBAL_BATCH_SIZE=30 is not a multiple of MICRO_BATCH_SIZE=4 x 1": {"GLOBAL_BATCH_SIZE": "30"},
    "9 microbatches": {"GLOBAL_BATCH_SIZE": "36", "USE_DPP": "0"},
    "PRECISION=fp8: must be": {"PRECISION": "fp8"},
    "VOCAB_FILE=missing": {"VOCAB_FILE": "missing"},
    "MERGE_FILE=missing": {"MERGE_FILE": "missing"},
    "missing.bin is missing; tools/preprocess_data.py makes it": {"DATA_PATH": "0.3 missing"},
    "NODE_RANK=1: with NUM_NODES=1": {"NODE_RANK": "1"},
    "USE_DPP=false: must be 0 or 1": {"USE_DPP": "false"},
    "TRACE=yes: must be 0 or 1": {"TRACE": "yes", "DRY_RUN": "0"},
    "MASTER_PORT=70000": {"MASTER_PORT": "70000"},
    "expected one per node (1) or one per rank (4)": {"NODE_IPS": "10.0.0.1,10.0.0.2"},
    "'host-a' is not an IP address": {"NODE_IPS": "host-a"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Called as the scripts call it. Without DRY_RUN: if this were not refused, it would train."""
    own = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "PYTHON": "/nonexistent"}
    monkeypatch.setattr(os, "environ", own | REFUSED[message])
    assert main(["train", "--preset", "gpt-sample", "node"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


@pytest.mark.parametrize("words", [[], ["gpt"], ["gpt", "boss"], ["t5", "node"]])
def test_an_unknown_recipe_or_role_is_refused(words: list[str]) -> None:
    result = run("examples/launch.sh", *words)
    assert result.returncode == 2
    assert result.stderr.startswith("launch.sh: error: examples/launch.sh")
    assert "expected gpt, bert, gpt-sample or bert-sample" in result.stderr


def test_an_unknown_flag_is_refused_before_set_up_and_torchrun(tmp_path: Path) -> None:
    # A Python that cannot import PyTorch, as before set-up.
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    result = run("run_single_gpt.sh", "--use-ddp", PYTHON=str(tmp_path / "python"))
    assert result.returncode == 2
    assert (
        result.stderr
        == "run_single_gpt.sh: error: unknown flag --use-ddp (did you mean --use-dpp?)\n"
    )


@pytest.mark.parametrize("model", MODELS)
def test_master_and_worker_agree_but_for_their_rank(model: str) -> None:
    settings = {"MASTER_ADDR": "10.0.0.1", "NODE_IPS": "10.0.0.1,10.0.0.2"}
    master = dry_run(f"run_master_{model}.sh", **settings)
    worker = dry_run(f"run_worker_{model}.sh", **settings)
    rank = master.index("--node_rank") + 1
    assert (master[rank], worker[rank]) == ("0", "1")
    assert master[:rank] + master[rank + 1 :] == worker[:rank] + worker[rank + 1 :]
    args = flags_of(worker)
    assert args.multi_node
    assert args.dpp_node_ips == settings["NODE_IPS"]
    assert "--master_addr 10.0.0.1 --master_port 6000" in torchrun_part(master)


def test_any_number_of_nodes() -> None:
    command = dry_run("run_worker_gpt.sh", MASTER_ADDR="h", NUM_NODES="3", NODE_RANK="2")
    assert "--nnodes 3 --node_rank 2" in torchrun_part(command)
    assert flags_of(command).pipeline_model_parallel_size == 3


def test_a_worker_needs_to_know_its_master() -> None:
    result = run("run_worker_gpt.sh")
    assert result.returncode == 2
    assert "MASTER_ADDR is not set" in result.stderr


def wait_for_master(port: int, seconds: int) -> None:
    job.wait_for_master(
        job.Job(per_node=1, num_nodes=2, node_rank=1, master="127.0.0.1", port=port, wait=seconds)
    )


def test_a_worker_gives_up_with_a_countdown(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(ConfigError, match=r"no master at .* within WAIT_SECONDS=2"):
            wait_for_master(unused.getsockname()[1], seconds=2)
    said = capsys.readouterr().out
    assert "waiting for the master" in said
    assert "2 s left" in said


def test_a_worker_goes_on_when_the_master_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_master(server.getsockname()[1], seconds=30)


def test_slurm_starts_one_node_of_each_rank(tmp_path: Path) -> None:
    stubs = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'while [[ $1 == --* ]]; do echo "srun $1"; shift; done\n'
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_PER_TASK": "48",
        "SLURM_GPUS_ON_NODE": "8",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    result = run("examples/slurm/train_gpt.sbatch", "--log-throughput", DRY_RUN="1", **slurm)
    assert result.returncode == 0, result.stderr
    commands = [line for line in result.stdout.splitlines() if "pretrain_gpt.py" in line]
    assert len(commands) == 2
    assert "srun --cpus-per-task=48\n" in result.stdout  # newer ones do not take it from the job
    for rank, command in enumerate(commands):
        assert f"--nnodes 2 --node_rank {rank} --master_addr node-a --master_port 20077" in command
        assert "--log-throughput" in command


def test_kubernetes_job_is_consistent() -> None:
    text = (ROOT / "examples" / "kubernetes" / "train-gpt.yaml").read_text()
    service, indexed = yaml.safe_load_all(text)
    spec = indexed["spec"]
    container = spec["template"]["spec"]["containers"][0]
    settings = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(settings["NUM_NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == settings["GPUS_PER_NODE"]
    name, subdomain = settings["MASTER_ADDR"].split(".")
    assert name == f"{indexed['metadata']['name']}-0"
    assert subdomain == spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == indexed["metadata"]["name"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/dev/shm" in mounts


def all_scripts() -> list[str]:
    patterns = ("*.sh", "examples/**/*.sh", "examples/slurm/*.sbatch", "tools/*.sh", ".ci/run")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@pytest.mark.parametrize("script", all_scripts())
def test_scripts_parse_and_edit_no_file(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    text = (ROOT / script).read_text()
    assert "sed -i" not in text
    assert "/dev/shm/" not in text


def test_quick_test_says_what_it_is_and_takes_nothing_else() -> None:
    script = ROOT / "tools" / "quick_test.sh"
    told = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, timeout=150)
    assert told.returncode == 0
    assert "One verdict per line" in told.stdout
    wrong = subprocess.run(["bash", script, "fast"], capture_output=True, text=True, timeout=150)
    assert wrong.returncode == 2
    assert "takes no argument (fast)" in wrong.stderr
