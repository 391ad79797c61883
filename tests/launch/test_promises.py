"""Spellings of the earlier projects that ``train`` and the launch scripts accept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint.files import TRACKER
from megatron.dpp_train.cost.device import known_gpu
from megatron.dpp_train.launch.cli import MODES
from megatron.dpp_train.launch.flags import resume_flags
from megatron.dpp_train.launch.main import main, plan
from megatron.dpp_train.launch.scripts import settings_of
from tests.conftest import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs" / "models").glob("*.yaml"))
DRY = ["--dry-run", "--gpu", "H100", "--gpus", "8"]


def flags(*words: str) -> dict[str, object]:
    return plan([*words, *DRY]).resolved.flags


@pytest.mark.parametrize(
    ("hidden", "heads"), [(256, 4), (1024, 16), (1600, 25), (2048, 16), (4096, 32), (5120, 40)]
)
def test_heads_follow_from_the_hidden_size(hidden: int, heads: int) -> None:
    """Small models keep theirs."""
    words = ["--mode", "3d", "--num-layers", "2", "--hidden-size"]
    assert flags(*words, str(hidden))["--num-attention-heads"] == heads
    assert flags(*words, str(hidden), "--num-attention-heads", "8")["--num-attention-heads"] == "8"
    assert flags(*words, "64", "--model", "sample")["--num-attention-heads"] == 4


TOO_LARGE = {
    *("mixtral-8x7b", "qwen3-30b-a3b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.1-70b"),
    *("mistral-7b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-4b", "qwen3-8b"),
    *("qwen3-14b", "qwen3-32b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"),
}
"""Models that need more than the memory of one rank."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_goes_with_megatrons_mode(config: Path) -> None:
    words = ["--mode", "megatron", "--config", str(config), *DRY]
    if config.stem in TOO_LARGE:
        with pytest.raises(ConfigError, match=r"fullest rank needs .*or a layout in --config"):
            plan(words)
        return
    found = plan(words)
    assert found.resolved.flags["--yaml-cfg"] == str(config)
    assert found.estimate.peak_bytes > 0


def test_a_complete_file_of_megatrons_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    named = "max-position-embeddings: 1024\ntrain-iters: 7\neval-iters: 0\nspec: local\n"
    file.write_text((REPOSITORY / "configs" / "models" / "small.yaml").read_text() + named)
    found = plan(["--mode", "megatron", "--config", str(file), *DRY]).resolved.flags
    own = {"--max-position-embeddings", "--train-iters", "--eval-interval", "--transformer-impl"}
    assert not own & set(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "config", [path for path in CONFIGS if path.stem not in TOO_LARGE], ids=lambda path: path.stem
)
def test_every_configuration_goes_with_every_mode(mode: str, config: Path) -> None:
    assert plan(["--mode", mode, "--config", str(config), *DRY]).estimate.peak_bytes > 0


def test_stage_0_of_zero_shares_nothing() -> None:
    found = plan(["--mode", "zero", "--zero-stage", "0", *DRY]).resolved
    assert found.shard == "none" and "--use-distributed-optimizer" not in found.flags
    with pytest.raises(ConfigError, match="--zero-stage 0 shards nothing"):
        flags("--mode", "zero", "--zero-stage", "0", "--engine", "deepspeed")


@pytest.mark.parametrize("name", ["iter_0001000", "checkpoint-1000", "."])
def test_a_run_resumes_from_one_iterations_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "iter_0001000").mkdir()
    (tmp_path / TRACKER).write_text("2000")
    found = resume_flags(f"{tmp_path}/{name}")
    assert Path(str(found["--load"])) == tmp_path
    assert found.get("--ckpt-step") == (None if name == "." else 1000)
    with pytest.raises(DataError, match="no checkpoint is there"):
        resume_flags(str(tmp_path / "checkpoint-7"))


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-3090", "4090", "A6000", "L40S", "a10", "MI300X"])
def test_a_gpu_of_the_table(name: str) -> None:
    assert known_gpu(name).memory_bytes > 20 * 2**30


@pytest.mark.parametrize(
    ("name", "known", "gib"),
    [
        ("H20", "H20", 95), ("h800", "H800", 80), ("A800", "A800", 80), ("GB200", "GB200", 184),
        ("B200", "B200", 179), ("RTX5090", "RTX 5090", 31), ("RTX 5090", "RTX 5090", 31),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 31), ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("nvidia-h200", "H200", 140),
    ],
)  # fmt: skip
def test_a_gpu_in_each_spelling(name: str, known: str, gib: int) -> None:
    device = known_gpu(name)
    assert (device.name, device.memory_bytes) == (known, gib * 2**30)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--mode", "3D"], r"--mode 3D \(did you mean 3d\?\): expected one of simple, 3d"),
        (["--mode", "deepsped"], r"deepsped \(did you mean deepspeed\?\)"),
        (["--model", "llama"], r"--model llama: neither a folder here with a config.json nor"),
    ],
)
def test_unknown_names_say_what_was_looked_for(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan([*words, "--procs", "1", "--dry-run"])


@pytest.mark.parametrize("typed", ["--run-dir", "RUN_DIR"])
def test_an_error_names_the_run_directory_as_it_was_typed(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setenv("RUN_DIR", "" if typed == "--run-dir" else str(tmp_path))
    words = ["--run-dir", str(tmp_path)] if typed == "--run-dir" else []
    assert main(["--mode", "simple", "--procs", "1", "--mock-data", *words]) == 2
    assert capsys.readouterr().err.startswith(
        f"megatron-dpp train: error: {typed} {tmp_path}: metrics.jsonl of an ear"
    )


def test_a_gpu_of_given_figures() -> None:
    figures = "--tflops 300 --memory 80 --bandwidth 2000"
    devices = plan(f"--dry-run --gpus 4 --mode 3d --pp 4 {figures}".split()).devices
    assert (devices.on_gpu, devices.world_size) == (True, 4)
    device = devices.device
    assert (device.flops, device.memory_bytes) == (3e14, 80 * 2**30)
    assert device.bytes_per_second == 2e12
    with pytest.raises(ConfigError, match="--tflops, --memory and --bandwidth"):
        known_gpu("GTX 1")


def test_num_gpus_counts_processes() -> None:
    assert plan(["--num-gpus", "4", "--gpu", "H100", "--dry-run"]).devices.world_size == 4
    settings = settings_of("gpt", "node", {"NUM_GPUS": "4"}, sample=True)
    assert settings["GPUS_PER_NODE"] == "4"
    both = settings_of("gpt", "node", {"NUM_GPUS": "4", "GPUS_PER_NODE": "2"}, sample=True)
    assert both["GPUS_PER_NODE"] == "2"


@pytest.mark.parametrize(
    ("folder", "script"),
    [("datasets_gpt", "../tools/preprocess_data.py"), ("profiling", "aggregate.py")],
)
def test_a_script_runs_from_another_directory(folder: str, script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, script, "--help"], cwd=REPOSITORY / folder, env=environment,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ran.returncode == 0 and Path(script).name in ran.stdout, ran.stderr
