"""Settings that a machine without GPUs lacks are switched off before a run starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.initialize import expand_segments, may_expand
from megatron.dpp_train.model.configs import settled
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig
from tests.loop.several import corpus, train_each

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def on_cpu(*flags: str) -> RunConfig:
    return settled(parse_args(["--device", "cpu", *flags]).frozen())


def test_a_cpu_has_no_persistent_checkpoint_worker() -> None:
    """megatron-core's worker fails without a GPU, and the save waits for it."""
    args = on_cpu("--async-save", "--use-persistent-ckpt-worker")
    assert args.distributed_backend == "gloo" and not args.use_persistent_ckpt_worker


def test_a_cpu_has_no_use_for_settings_of_nccl() -> None:
    """PyTorch without CUDA has no options for NCCL."""
    groups = "--high-priority-stream-groups tp dp --nccl-communicator-config-path nccl.yaml"
    args = on_cpu(*groups.split())
    assert args.parsed["high_priority_stream_groups"] == ["tp", "dp"]
    assert not args.high_priority_stream_groups and args.nccl_communicator_config_path is None


def test_a_cpu_rotates_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would read the memory of the CPU as the GPU's."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert not on_cpu("--position-embedding-type", "rope").apply_rope_fusion


def test_a_cpu_that_is_found_late_refuses_kernels_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And takes megatron-core's own generators."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    flags = ["--device", "auto", "--te-rng-tracker", "--transformer-impl"]
    with pytest.raises(ConfigError, match=r"transformer_engine needs .* this run is on the CPU"):
        on_cpu(*flags, "transformer_engine")
    assert not on_cpu(*flags, "local").te_rng_tracker


EXPERTS = (
    "--train-iters 3 --num-experts 4 --disable-bias-linear --use-distributed-optimizer "
    "--clip-grad 0.01"
)
RUNS = {
    "experts": f"{EXPERTS} --save DIR/ckpt --save-interval 2",
    "resumed": f"{EXPERTS} --load DIR/ckpt --ckpt-step 2",
    "fp16": "--train-iters 2 --fp16 --initial-loss-scale 1024 --optimizer sgd --clip-grad 0.01",
}


def test_an_installed_transformer_engine_changes_nothing_on_a_cpu(tmp_path: Path) -> None:
    """megatron-core takes its optimizers and kernels wherever it is installed."""
    results = []
    for with_engine in (False, True):
        folder = tmp_path / str(with_engine)
        folder.mkdir()
        results.append(train_each(folder, 1, RUNS, corpus(), with_engine=with_engine))
    for name, without in results[0].items():
        for column in ("lm loss", "grad norm"):
            assert results[1][name].column(column) == without.column(column), name
        assert without.hashes and results[1][name].hashes == without.hashes


def test_an_allocator_that_nobody_has_set_up_expands_its_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch reads the older name first, even if it is empty."""
    for empty in ({}, *({name: ""} for name in ALLOCATOR)):
        monkeypatch.setattr(os, "environ", dict(empty))
        expand_segments()
        registers = os.environ.pop("NCCL_GRAPH_REGISTER")
        (found,) = os.environ.items()
        assert found[0] in ALLOCATOR and found[1] == "expandable_segments:True"
        assert registers == "0", "CUDA graphs must not register such memory"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_an_allocator_that_is_set_up_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    expand_segments()
    assert os.environ == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize(
    ("flags", "expands"),
    [
        ("--sft", True),
        ("", False),
        ("--sft --device cpu", False),
        ("--sft --use-nccl-ub", False),
        ("--sft --async-save --use-persistent-ckpt-worker", False),
        ("--sft --async-save", True),
    ],
)
def test_memory_that_others_open_or_register_is_not_expandable(flags: str, expands: bool) -> None:
    args = parse_args(["--device", "cuda", *flags.split()]).frozen()
    assert may_expand(args.with_(variable_lengths=args.sft)) is expands


@pytest.mark.gpu
def test_the_allocator_reads_that_setting_when_it_first_takes_memory() -> None:
    script = """
import torch
from megatron.dpp_train.initialize import expand_segments
torch.cuda.is_available(), torch.cuda.device_count()
expand_segments()
taken = torch.empty(1 << 24, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory._snapshot()["segments"]])
"""
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2] == "[True]", done.stderr
