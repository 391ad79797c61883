"""Flags that ``train``'s options resolve to, and refusals with their nearest choice."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.dpp.errors import ConfigError, DppError
from megatron.dpp_train.cost.device import gpu_device
from megatron.dpp_train.cost.memory import model_parameters
from megatron.dpp_train.cost.planned import take_plan
from megatron.dpp_train.launch import cli
from megatron.dpp_train.launch.checked import checked, shape_from
from megatron.dpp_train.launch.flags import MODELS, model_flags, to_argv
from megatron.dpp_train.launch.layout import Layout
from megatron.dpp_train.launch.main import main, plan
from megatron.dpp_train.launch.nodes import find_nodes
from megatron.dpp_train.launch.resolve import Devices, base_flags, resolve
from megatron.dpp_train.launch.start import prepare
from megatron.dpp_train.options.arguments import parse_args, warnings_of
from megatron.dpp_train.preflight.check import build_vocabulary
from megatron.dpp_train.preflight.files import check_split
from tests.preflight.test_check import WITHOUT_TORCH

ROOT = Path(__file__).resolve().parents[2]
H200 = Devices(per_node=8, num_nodes=1, on_gpu=True, device=gpu_device("NVIDIA H200", 141 * 2**30))
RESOLVED = {
    "--mode simple --procs 4": {"data_parallel": 4, "use_dpp": False, "bf16": False},
    "--mode 3d --procs 4 --tp 2 --pp 2": {"data_parallel": 1, "use_dpp": True},
    "--mode 3d --procs 8 --pp 2 --chunks 2 --no-dpp": {
        "data_parallel": 4,
        "use_dpp": False,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "--mode zero --procs 2": {"use_distributed_optimizer": True, "use_torch_fsdp2": False},
    "--mode deepspeed --zero-stage 2 --procs 2": {
        "use_torch_fsdp2": True,
        "torch_fsdp2_reshard_after_forward": False,
    },
    "--mode zero --zero-stage 3 --procs 2": {
        "use_torch_fsdp2": True,
        "torch_fsdp2_reshard_after_forward": True,
    },
    "--mode megatron --procs 4 --pipeline-model-parallel-size 4 --log-interval 7": {
        "data_parallel": 1,
        "log_interval": 7,
        "use_dpp": False,
    },
    "--mode simple --procs 1 --bf16 --lr 0.5 --max-steps 9 --num-layers 3": {
        "bf16": True,
        "lr": 0.5,
        "train_iters": 9,
        "num_layers": 3,
        "lr_decay_iters": 9,
    },
    "--mode 3d --procs 2 --pp 2 --recompute full": {"recompute_granularity": "full"},
}
REFUSED = {
    "--mode 3d --procs 4 --tp 3 --pp 2": "nearest possible: --tp 2 --pp 2",
    "--mode 3d --procs 6 --tp 2 --pp 2": "or --procs 8",
    "--mode 3d --procs 4 --pp 2 --chunks 3": "nearest possible: --tp 1 --pp 2 --chunks 4",
    "--mode 3d --procs 2 --chunks 2": "nearest possible: --tp 1 --pp 1",
    "--mode 3d --procs 8 --tp 8": "nearest possible: --tp 4 --pp 1",
    "--mode zero --zero-stage 3 --pp 2": "--pp does not go with --mode zero; nearest: --mode 3d",
    "--mode zero --zero-stage 4": "invalid choice: 4",
    "--mode hurry": "--mode hurry: expected one of simple, 3d",
    "--mode simple --procs 2 --batch-size 33": "nearest possible: 32",
    "--mode simple --procs 2 --model big": "there are gpt2, gpt2-large, gpt2-medium",
    "--mode simple --procs 2 --hidden-size 130": "nearest: 128",
    "--mode simple --procs 0": "nearest possible: 1",
    "--procs 99999999999999999999": "nearest possible: 1048576",
    "--load-hf=": "--load-hf is empty",
    "--save-hf=": "--save-hf is empty",
    "--mode simple --gpus 99": "nearest possible:",
    "--mode simple --procs 2 --config {tmp}/no.yaml": "no.yaml: No such file or directory",
    "--mode megatron --procs 2 --config {tmp}/none.yaml": "--config ",
    "--mode simple --procs 2 --data {tmp}/no.jsonl": "(nearest: {tmp}/now.jsonl)",
    "--mode simple --procs 2 --data {tmp}/no": "neither rows (.json, ",
    "--mode simple --procs 2 --resume-from {tmp}/ckp": "(nearest: {tmp}/ckpt)",
    "--mode simple --procs 2 --num-layer 3": "did you mean --num-layers?",
    "--mode simple --procs 2 --fp16 --bf16": "exclude each other",
    "--mode simple --procs 2 --num-layers 900 --hidden-size 8192": "no layout fits",
    "--mode auto --procs 2 --memory 0.0001": "no layout fits",
    "simple": "unexpected argument 'simple'",
    "--mode simple --seq-length 0": "--seq-length 0: nearest possible: 1",
    "--mode simple --micro-batch-size -2": "--micro-batch-size -2: nearest possible: 1",
    "--mode simple --lr 0": "--lr 0: must be above 0",
    "--mode zero --zero-stage 3 --procs 2 --pipeline-model-parallel-size 2": (
        "does not go with --pipeline-model-parallel-size above 1; nearest: "
        "--use-distributed-optimizer"
    ),
    "--mode zero --zero-stage 2 --procs 2 --fp16": "does not go with --fp16; nearest: --bf16",
    "--procs 2 --resume-from {tmp}/data": "data: no checkpoint is there (nearest: {tmp}/ckpt)",
    "--procs 2 --data {tmp}/data": "data.idx is missing\n",
    "--procs 2 --config {tmp}/no.yml": "no.yml: not YAML (",
    "--gpu H900": "expected one of GB200, B200, H200, H100",
    "--gpu H100 --procs 2": "exclude each other",
    "--mode auto --gpu V100 --gpus 2 --model large --memory 1": "nearest: about --gpus ",
    "--mode auto --procs 2 --memory 0.001": "of its 1.02 MiB, 92% can be used; nearest: fewer",
    "--procs 2 --num-attention-heads 0": "--num-attention-heads 0: nearest possible: 1",
    "--procs 2 --num-attention-heads x": "--num-attention-heads x: expected a whole number",
    "--procs 2 --num-attention-heads -4": "--num-attention-heads -4: nearest possible: 1",
    "--procs 2 --global-batch-size x": "--global-batch-size x: expected a whole number",
    "--procs 2 --mode simple --global-batch-size 33": "nearest possible: 32",
    "--procs 3 --mode auto --global-batch-size 32": "nearest possible: --batch-size 33",
    "--procs 2 --mode simple --train-iters 0": ": error: --train-iters 0: must be at least 1\n",
    "--procs 2 --mode simple --num-layers 100000000": "no layout fits",
    "--procs 2 --dryrun": "unknown flag --dryrun (did you mean --dry-run?)",
    "--procs 2 --model 345M": "nearest: medium",
    "--mode simple --procs 2 --tensor-model-parallel-size 2": "nearest: --mode 3d --tp 2",
    "--procs 2 --mode 3d --tp 2 --pipeline-model-parallel-size 1": "nearest: --mode 3d --pp 1",
    "--procs 2 --mode auto --use-torch-fsdp2": "nearest: --mode zero --zero-stage 3\n",
    "--procs 2 --mode auto --use-distributed-optimizer": "--mode auto decides about that",
    "--procs 2 --mode auto --dpp-plan shapes": "--dpp-plan: --mode auto decides about that",
    "--procs 2 --mode auto --dpp-replay tape": "--dpp-replay: --mode auto decides about that",
    "--procs 2 --decoder-first-pipeline-num-layers 2": "--mode auto decides about that",
    "--procs 2 --mode 3d --pp 2 --dpp-policy none": "expected one of auto, dynamic",
    "--procs 2 --mode auto --dpp-policy none": "--dpp-policy none: expected one of auto",
    "--procs 2 --mode auto --dpp-policy no_module:f": "--dpp-policy no_module:f: ModuleNotFound",
    "--procs 2 --mode auto --dpp-activation-cap 2x": "--dpp-activation-cap 2x: expected auto",
    "--procs 2 --mode auto --dpp-inject jiter:1": "--dpp-inject jiter:1: expected jitter",
    "--procs 2 --mode auto --dpp-inject slow-rank:2:2": "--dpp-inject slow-rank:2:2",
    "--procs 2 --mode simple --dpp-transport pigeon": "--dpp-transport pigeon: expected one of",
    "--procs 2 --mode simple --dpp-slots 0": "--dpp-slots 0: must be from 1 to",
    "--procs 2 --mode 3d --pp 2 --batch-size 64 --micro-batch-size 1 --dpp-policy breadth-first": (
        "holds all 64 microbatches"
    ),
    "--procs 2 --save {tmp}/now.jsonl": "--save {tmp}/now.jsonl: {tmp}/now.jsonl is a file",
    "--procs 2 --save {tmp}/now.jsonl/a/b": "{tmp}/now.jsonl is a file, a directory is expected",
    "--procs 2 --resume-from {tmp}/ckpt/iter_0000003": "(nearest: {tmp}/ckpt)",
    "--procs 2 --config {tmp}/typed.yaml": "--num-layers three: expected a whole number",
    "--procs 2 --config {tmp}/rate.yaml": "--lr quick: expected a number",
    "--procs 2 --config {tmp}/switch.yaml": "swiglu is a switch, not 'maybe'",
    "--procs 2 --mode megatron --config {tmp}/switch.yaml": "swiglu is a switch, not 'maybe'",
    "--procs 2 --mode megatron --config {tmp}/rate.yaml --model small": "exclude each other",
    "--procs 2 --vocab-file {tmp}/vocab.json": "vocab.json: No such file or directory",
    "--procs 2 --mock-data --data {tmp}/now.jsonl": "--data and --mock-data exclude each other",
}


def args_of(words: str) -> Any:
    """The training script's arguments that a command line resolves to, checked."""
    found = plan(words.split())
    args = parse_args(found.resolved.argv)
    shape = shape_from(found.resolved, found.devices)
    args.data_parallel = shape.data
    return args


@pytest.mark.parametrize("words", RESOLVED)
def test_options_resolve_to_megatrons_flags(words: str) -> None:
    args = args_of(words)
    for name, value in RESOLVED[words].items():
        assert getattr(args, name) == value, name
    assert not warnings_of(args)


def test_a_plan_may_be_made_for_gpus_of_another_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--gpu h200 --gpus 4 --model medium --dry-run"
    found = plan(words.split())
    assert found.devices.world_size == 4
    assert found.devices.device.memory_bytes == 140 * 2**30
    assert found.resolved.flags["--device"] == "cuda"
    assert main(["--gpu", "H200"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} {ROOT / 'train'} --procs 2 --dry-run | head -1"
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=150, cwd=ROOT
    )
    assert "Traceback" not in result.stderr


def test_new_text_is_tokenised_before_training(tmp_path: Path) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text(json.dumps({"text": "a"}) + "\n")
    words = ["--mode", "simple", "--procs", "2", "--data", str(text), "--tokenizer", "sample"]
    found = plan(words)
    assert found.preparation is not None and str(text) in found.preparation
    prefix = found.resolved.flags["--data-path"]
    assert prefix.startswith(str(tmp_path))
    Path(f"{prefix}.idx").touch()  # whose tokens somebody removed
    assert plan(words).preparation is not None


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_with_the_nearest_choice(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "now.jsonl").touch()
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "no.yml").write_text("[a](b)\n<x\n")
    (tmp_path / "typed.yaml").write_text("num-layers: three\n")
    (tmp_path / "rate.yaml").write_text("lr: quick\n")
    (tmp_path / "switch.yaml").write_text("swiglu: maybe\n")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    assert main([*words.format(tmp=tmp_path).split(), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert REFUSED[words].format(tmp=tmp_path) in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("option", ["--model", "--config", "--data", "--resume-from", "--save"])
def test_an_empty_value_is_not_taken_for_an_option_left_out(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is empty"):
        plan(["--procs", "2", option, ""])


def test_auto_shares_a_small_batch_out_otherwise() -> None:
    found = plan(["--mode", "auto", "--procs", "4", "--batch-size", "2", "--model", "sample"])
    assert found.resolved.flags["--global-batch-size"] == 2
    assert found.resolved.layout.tensor * found.resolved.layout.pipeline > 1
    shape = shape_from(found.resolved, found.devices)
    assert shape.global_batch == 2


def test_zero_counts_replicas_beside_tensor_parallelism() -> None:
    words = "--mode zero --zero-stage 2 --procs 4 --tensor-model-parallel-size 2"
    args = args_of(words)
    assert args.data_parallel == 2
    assert args.make_vocab_size_divisible_by == 512
    alone = plan(["--mode", "zero", "--procs", "1"])
    assert alone.warnings[-1].startswith("warning: there is one replica")


def test_every_mode_pads_the_vocabulary_alike() -> None:
    modes = ("simple", "3d --tp 2", "3d --pp 2", "3d --tp 4", "zero --zero-stage 3")
    plans = [plan(f"--mode {mode} --procs 4".split()) for mode in modes]
    sizes = {shape_from(each.resolved, each.devices).model.vocab_size for each in plans}
    assert sizes == {2048}


def test_dry_run_prints_flags_and_command_without_importing_torch() -> None:
    words = [
        "--mode",
        "3d",
        "--procs",
        "4",
        "--tp",
        "2",
        "--pp",
        "2",
        "--max-steps",
        "20",
        "--dry-run",
    ]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "train"), *words],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    assert "--tensor-model-parallel-size 2\n" in result.stdout
    command = result.stdout.splitlines()[-1]
    assert "megatron.dpp_train.launch.torchrun --nproc_per_node 4 " in command  # torchrun
    assert "pretrain_gpt.py " in command
    assert " --use-dpp" in command


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("small", 124.5),
        ("medium", 354.9),
        ("large", 1315.8),
        ("mixtral-8x7b", 46852.7),  # 46,702.8 with its own 32,000 tokens
        ("qwen3-30b-a3b", 30115.8),  # 30,532.1 with its own 151,936
    ],
)
def test_models_have_the_sizes_that_they_are_named_for(name: str, millions: float) -> None:
    options, rest = cli.parse(f"--mode simple --procs 1 --model {name}".split())
    flags = base_flags(options, [*rest, "--padded-vocab-size", "50304"], H200)
    flags |= prepare("gpt", None, flags).flags
    resolved = resolve(options, flags, H200, layout=Layout(), shard="none")
    assert model_parameters(shape_from(resolved, H200)) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_run_without_a_pipeline_is_replayed_on_gpus_unless_told_otherwise() -> None:
    def graphs(words: str, shard: str = "none") -> str | None:
        options, rest = cli.parse(f"--mode 3d {words}".split())
        flags = base_flags(options, rest, H200)
        layout = Layout(tensor=options.tp or 1, pipeline=options.pp or 1)
        resolved = resolve(options, flags, H200, layout=layout, shard=shard)
        assert not warnings_of(parse_args(resolved.argv))
        return resolved.flags.get("--dpp-cuda-graphs")

    assert graphs("--tp 2") == "on"
    assert graphs("--tp 2 --dpp-cuda-graphs off") == "off"
    assert graphs("--tp 1") == "on"
    assert graphs("--tp 1", shard="optimizer") == "on"
    assert graphs("--tp 1", shard="parameters") is None  # not wrapped by what graphs know
    assert graphs("--tp 2 --recompute selective") == "on"
    assert graphs("--tp 2 --recompute full") is None
    assert graphs("--tp 2 --pp 2") is None  # the dynamic pipeline sees by itself


def test_a_pipeline_on_gpus_is_laid_out_by_what_its_parts_cost() -> None:
    def planned(words: str) -> tuple[bool, tuple[int, ...]]:
        vocabulary = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50303"
        found = plan(f"{words} --model medium --gpu H200 {vocabulary} --dry-run".split())
        layers = shape_from(found.resolved, found.devices).layers
        assert "--dpp-plan" not in found.resolved.flags  # or every rank would plan again
        by_us = "--pipeline-model-parallel-layout" in found.resolved.flags
        assert by_us == ("layers laid out by what they cost" in found.heading[0])
        return by_us, layers

    by_us, layers = planned("--mode 3d --pp 2 --gpus 2")
    assert by_us and sum(layers[::2]) > sum(layers[1::2])  # the head is on the last
    assert planned("--mode 3d --pp 5 --gpus 5")[0]  # 24 layers need not divide evenly
    assert planned("--mode 3d --pp 2 --gpus 2 --chunks 2") == (False, (6, 6, 6, 6))
    assert planned("--mode 3d --pp 2 --gpus 2 --chunks 1") == (False, (12, 12))
    assert planned("--mode 3d --pp 2 --gpus 2 --no-dpp") == (False, (12, 12))
    assert not planned("--mode 3d --tp 2 --gpus 2")[0]
    assert planned("--mode 3d --pp 2 --gpus 2 --arch bert") == (False, (12, 12))
    chunks = "--num-layers-per-virtual-pipeline-stage 6"
    assert planned(f"--mode 3d --pp 2 --gpus 2 {chunks}") == (False, (6, 6, 6, 6))
    cut = "--decoder-last-pipeline-num-layers 10"
    assert planned(f"--mode 3d --pp 2 --gpus 2 {cut}") == (False, (14, 10))


def test_what_is_handed_on_is_what_every_rank_would_plan() -> None:
    model = "--mode 3d --pp 2 --procs 2 --num-layers 6 --dpp-plan shapes"
    handed = plan(f"{model} --dpp-activation-cap 2p".split()).resolved
    assert handed.flags["--dpp-activation-cap"] == "2p"
    found = plan(model.split()).resolved
    options, rest = cli.parse(model.split())
    devices = Devices(per_node=2, num_nodes=1, on_gpu=False, device=H200.device)
    flags = base_flags(options, [*rest], devices)
    flags |= prepare("gpt", None, flags).flags
    asked = resolve(options, flags, devices, layout=Layout(pipeline=2), shard="none")
    args, _ = build_vocabulary(checked(asked, devices))
    args = take_plan(args)
    assert found.flags["--pipeline-model-parallel-layout"] == args.pipeline_model_parallel_layout
    assert found.flags["--dpp-activation-cap"] == args.dpp_activation_cap
    same = checked(found, devices)
    derived = ("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "align_param_gather")
    assert [getattr(same, name) for name in derived] == [getattr(args, name) for name in derived]


def test_the_loss_is_fused_where_its_gradient_has_16_bits_anyway() -> None:
    def fused(words: str, gpus: int = 2) -> bool:
        resolved = plan(
            f"{words} --model medium --gpu H200 --gpus {gpus} --dry-run".split()
        ).resolved
        return bool(resolved.flags.get("--cross-entropy-loss-fusion"))

    assert (
        fused("--mode simple") and fused("--mode 3d --pp 2") and fused("--mode simple --arch bert")
    )
    assert not fused("--mode simple --fp16") and not fused("--mode simple --fp32")


def test_every_model_file_can_be_asked_for() -> None:
    names = {path.stem for path in MODELS.glob("*.yaml")}
    assert {"sample", "small", "medium", "large", "sample-experts", "llama3-8b"} <= names
    for name in names:
        parse_args(to_argv(model_flags(name)))


def test_config_file_lies_between_model_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num-layers: 6\nlr: 0.25\nswiglu: true\nlog_interval: 5\n")
    args = args_of(f"--mode simple --procs 1 --config {path} --num-layers 2")
    assert (args.num_layers, args.lr, args.swiglu, args.log_interval) == (2, 0.25, True, 5)


def test_a_file_of_megatrons_own_decides_alone(tmp_path: Path) -> None:
    path = tmp_path / "megatron.yaml"
    path.write_text(
        "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n"
        "seq_length: 64\nmax_position_embeddings: 64\nmicro_batch_size: 2\nlr: 0.001\n"
        "transformer_impl: local\neval_iters: 0\ntrain_iters: 9\nmock_data: true\n"
    )
    args = args_of(f"--mode megatron --procs 2 --config {path} --max-steps 5")
    assert (args.num_layers, args.train_iters, args.lr) == (4, 5, 0.001)
    assert args.mock_data
    assert args.data_path is None
    own = "--num-layers 2 --hidden-size 32 --batch-size 8 --lr 0.5 --bf16"
    args = args_of(f"--mode megatron --procs 2 --config {path} {own}")
    assert (args.num_layers, args.hidden_size, args.global_batch_size) == (2, 32, 8)
    assert (args.lr, args.bf16, args.seq_length) == (0.5, True, 64)


def test_samples_may_stand_for_iterations_and_uneven_cuts_for_even_ones() -> None:
    args = args_of("--mode simple --procs 2 --train-samples 320")
    assert (args.train_iters, args.train_samples, args.lr_decay_samples) == (None, 320, 320)
    cut = "--decoder-first-pipeline-num-layers 3"
    args = args_of(f"--mode 3d --pp 2 --procs 2 --num-layers 7 {cut}")
    assert args.num_layers == 7


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("--gpu V100", "fp16"),
        ("--gpu T4", "fp16"),
        ("--gpu V100 --bf16", "bf16"),
        ("--gpu V100 --fp32", None),
        ("--gpu A100", "bf16"),
        ("--gpu A100 --fp16", "fp16"),
    ],
)
def test_gpus_train_in_the_16_bits_that_they_are_built_for(
    words: str, precision: str | None
) -> None:
    args = args_of(f"--mode simple --gpus 2 --dry-run {words}")
    assert (args.fp16, args.bf16) == (precision == "fp16", precision == "bf16")
    assert args.initial_loss_scale == (65536 if args.fp16 else 2**32)


def test_nodes_come_from_the_environment() -> None:
    ours = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "alpha"}
    assert find_nodes(ours).environment() == ours
    slurm = {
        "SLURM_NNODES": "3",
        "SLURM_NODEID": "2",
        "SLURM_NTASKS": "3",
        "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    }
    found = find_nodes(slurm)
    assert (found.count, found.rank, found.master) == (3, 2, "gpu07")
    assert find_nodes({}).count == 1
    empty = find_nodes({**slurm, "NUM_NODES": "", "NODE_RANK": ""})  # an empty variable is unset
    assert (empty.count, empty.rank) == (3, 2)
    for wrong in (
        {**slurm, "SLURM_NTASKS": "24"},
        {"NUM_NODES": "2"},
        {"NUM_NODES": "two"},
        {"NUM_NODES": "0"},
        {**ours, "NODE_RANK": "2"},
        {"NUM_NODES": "2", "NODE_RANK": "0"},
    ):
        with pytest.raises(DppError):
            find_nodes(wrong)


def test_json_lines_are_preprocessed_once_for_each_vocabulary(tmp_path: Path) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text(json.dumps({"text": "a"}) + "\n")
    first = prepare("gpt", str(text), {})
    assert first.preparation is not None
    assert str(text) in first.preparation
    assert "--skip-bad-lines" in (
        prepare("gpt", str(text), {}, skip_bad_lines=True).preparation or []
    )
    prefix = Path(first.flags["--data-path"])
    for suffix in (".bin", ".idx"):
        prefix.with_name(prefix.name + suffix).touch()
    assert prepare("gpt", str(text), {}).preparation is None
    assert prepare("gpt", f"{prefix}.bin", {}).flags["--data-path"] == str(prefix)
    text.write_text(json.dumps({"text": "b"}) + "\n")
    assert prepare("gpt", str(text), {}).preparation is not None
    assert prepare("bert", str(text), {}).preparation is not None
    assert prepare("gpt", None, {"--mock-data": True}).preparation is None


def test_few_documents_leave_something_for_every_set(tmp_path: Path) -> None:
    def split(documents: int) -> dict[str, Any]:
        prefix = tmp_path / f"mine{documents}"
        sizes = np.ones(documents, dtype=np.int32)
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
        pointers = 2 * np.arange(documents, dtype=np.int64)
        starts = np.arange(documents + 1, dtype=np.int64)
        parts = (sizes, pointers, starts)
        prefix.with_suffix(".idx").write_bytes(header + b"".join(each.tobytes() for each in parts))
        prefix.with_suffix(".bin").write_bytes(bytes(2 * documents))
        return plan(["--procs", "2", "--data", str(prefix)]).resolved.flags

    for documents in (100, 101, 400, 999, 1000):  # refused before, below 1000
        chosen = split(documents)["--split"]
        check_split("mine", chosen, documents)
        assert (chosen == "949,50,1") == (documents == 1000)
    for documents in (1, 2, 8, 99):  # of eight, one was held out for each set
        assert split(documents).items() >= {"--split": "1,0,0", "--eval-iters": 0}.items()
    given = plan(["--procs", "2", "--split", "8,1,1"])
    assert given.resolved.flags["--split"] == "8,1,1"
    assert not given.own_split


def test_a_wrong_word_is_refused_before_set_up(tmp_path: Path) -> None:
    words = [sys.executable, "-S", str(ROOT / "train"), "--mode", "simple", "--max-steps", "0"]
    bare = {"PATH": os.environ["PATH"], "PYTHONNOUSERSITE": "1"}
    result = subprocess.run(words, capture_output=True, text=True, timeout=150, env=bare)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "train: error: --max-steps 0: nearest possible: 1\n"
