"""Settings that a machine without GPUs lacks are switched off before a run starts."""

from __future__ import annotations

import importlib.util

import pytest

from megatron.dpp.cli.arguments import parse_args
from megatron.dpp.cli.run_config import RunConfig
from megatron.dpp.train.configs import settled


def on_cpu(*flags: str) -> RunConfig:
    return settled(RunConfig(vars(parse_args(["--device", "cpu", *flags]))))


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
