"""Settings that a machine without GPUs lacks are switched off before a run starts."""

from __future__ import annotations

from megatron.dpp.cli.arguments import parse_args
from megatron.dpp.train.configs import settled


def test_a_cpu_has_no_persistent_checkpoint_worker() -> None:
    """megatron-core's chooses a GPU by its rank modulo none, dies, and the save waits for it."""
    flags = "--device cpu --async-save --use-persistent-ckpt-worker"
    args = settled(parse_args(flags.split()))
    assert args.distributed_backend == "gloo" and not args.use_persistent_ckpt_worker


def test_a_cpu_has_no_use_for_settings_of_nccl() -> None:
    """megatron-core makes options of NCCL from them, which PyTorch without CUDA does not have."""
    groups = "--high-priority-stream-groups tp dp --nccl-communicator-config-path nccl.yaml"
    args = parse_args(["--device", "cpu", *groups.split()])
    assert args.high_priority_stream_groups == ["tp", "dp"]
    args = settled(args)
    assert not args.high_priority_stream_groups and args.nccl_communicator_config_path is None
