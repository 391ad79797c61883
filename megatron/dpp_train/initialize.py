"""Joins the job: device, process groups, seeds, microbatch calculator.

``job`` calls :func:`initialize` once per process; the :class:`Run` that it returns holds what the
parts of a run share. The process groups live in megatron-core's ``parallel_state``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import socket
import time
from datetime import timedelta
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import (
    num_microbatches_calculator,
    parallel_state,
    rerun_state_machine,
    tensor_parallel,
)
from megatron.core.safe_globals import register_safe_globals
from megatron.core.timers import Timers
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from megatron.dpp import __version__
from megatron.dpp.errors import PeerDead, VersionMismatch, one_line
from megatron.dpp_train import culprits
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run


def may_expand(args: RunConfig) -> bool:
    """True if expandable segments suit this run: its lengths are unlike, and nothing needs memory
    of another kind. NCCL's user buffers have a pool of their own, which megatron-core refuses with
    them. The persistent checkpoint worker opens the rank's memory, which with them takes the right
    to trace the rank, as containers and kernels may forbid.
    """
    shares = args.async_save and args.use_persistent_ckpt_worker
    on_gpu = args.device != "cpu"
    return bool(args.variable_lengths and on_gpu and not args.nccl_ub and not shares)


def expand_segments() -> None:
    """Let PyTorch's allocator extend its segments, unless the environment sets the allocator up.

    Blocks of unlike lengths do not fit into each other's segments of a fixed size. The allocator
    reads the setting when it first takes memory, and NCCL its own when it first is used: memory of
    such segments must not be registered for CUDA graphs.
    """
    known = hasattr(torch._C, "_accelerator_setAllocatorSettings")
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter before PyTorch 2.9
    if any(os.environ.get(name) for name in names):
        return
    for name in names:
        os.environ.pop(name, None)  # an empty one would hide the other
    os.environ[names[0] if known else names[1]] = "expandable_segments:True"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def initialize(args: RunConfig, rank: int) -> Run:
    """Joins the job."""
    cpu_support = None
    if args.device == "cpu":
        from megatron.dpp.core.cpu import install

        cpu_support = install()
    if args.gradient_accumulation_fusion:
        from megatron.dpp.core.wgrad import fused

        fused.provide()
    if args.variable_lengths:  # cuDNN plans each new length anew, for longer than most steps take
        torch.backends.cuda.enable_cudnn_sdp(False)
    if may_expand(args):
        expand_segments()
    if args.deterministic_mode:  # equal inputs give equal bits, at some cost in speed
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is opened
        torch.use_deterministic_algorithms(True)
    device = _join_process_group(args, rank)
    store = dist.distributed_c10d._get_default_store()
    culprits.announce(store, rank)  # the group's own, with other keys than the one that it met in
    check_agreement(args, rank, args.world_size, store)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        high_priority_stream_groups=list(args.high_priority_stream_groups),
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )
    set_seeds(args)
    register_safe_globals()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )
    # megatron-core's gradient checks go through its re-run machine; here a bad gradient stops the
    # run at once.
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    timers = Timers(args.timing_log_level, args.timing_log_option)
    return Run(args=args, rank=rank, device=device, timers=timers, cpu_support=cpu_support)


def _join_process_group(args: RunConfig, rank: int) -> torch.device:
    options: dict[str, Any] = {
        "backend": args.distributed_backend,
        "rank": rank,
        "world_size": args.world_size,
        "timeout": timedelta(minutes=args.distributed_timeout_minutes),
    }
    device = torch.device("cpu")
    if args.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", args.local_rank or 0))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    store: Any = None
    try:
        if "MASTER_ADDR" not in os.environ:  # one process, no launcher
            store = HashStore()
        else:
            _await_store(rank, options["timeout"].total_seconds())
            where = {"rank": rank, "world_size": args.world_size, "timeout": options["timeout"]}
            found, _, _ = next(rendezvous("env://", **where))
            found.set_timeout(options["timeout"])
            store = PrefixStore("default_pg", found)
        culprits.announce(store, rank)
        dist.init_process_group(**options, store=store)
    except (dist.DistError, RuntimeError, OSError) as error:
        who = "" if store is None else culprits.of_ranks(store, rank, args.world_size)
        raise PeerDead(
            f"the ranks did not meet (--distributed-timeout-minutes "
            f"{args.distributed_timeout_minutes}): {one_line(error, _SAID).rstrip('.')}{who}"
        ) from error
    return device


def _await_store(rank: int, seconds: float) -> None:
    """Wait until rank 0's store listens. PyTorch waits more than twice as long as it is told to.

    Raises:
        OSError: it does not listen in time.
    """
    if rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun has it
        return
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), max(end - time.monotonic(), 1.0)).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise OSError(
                    f"MASTER_ADDR={host} MASTER_PORT={port}: {error.strerror or error}: rank 0 has "
                    "not come, or has ended"
                ) from error
        time.sleep(_NAP_SECONDS)


def set_seeds(args: RunConfig) -> None:
    """Sets Megatron-LM's seeds: by pipeline rank, then the tensor-parallel generators."""
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, args.te_rng_tracker, args.inference_rng_tracker
    )


# May differ from host to host: paths, and a rank's own number.
_MAY_DIFFER = (
    *("rank", "local_rank", "save", "load", "pretrained_checkpoint", "load_hf", "save_hf"),
    "model_origin",
)
_PATHS = ("_path", "_dir", "_file", "_cfg")
_MAX_SHOWN = 5
_SAID = 200
"""Characters of an error of PyTorch's that are quoted."""
_NAP_SECONDS = 0.2


def description(args: RunConfig) -> dict[str, str]:
    """Settings and versions that all ranks must share, as text by name."""
    said = {
        "--" + name.replace("_", "-"): repr(value)
        for name, value in sorted(vars(args).items())
        if name not in _MAY_DIFFER and not name.endswith(_PATHS)
    }
    said["megatron.dpp"] = __version__
    said["Python"] = ".".join(platform.python_version_tuple()[:2])
    for package in ("torch", "megatron-core"):
        try:
            said[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            said[package] = "not installed as a package"
    return said


def differences(own: dict[str, str], first: dict[str, str], rank: int, host: str) -> str:
    """Describes how a rank differs from rank 0; empty when it does not."""
    nothing = "not known"
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    shown = [
        f"{name} is {first.get(name, nothing)} on rank 0 and {own.get(name, nothing)} on "
        f"rank {rank} ({host})"
        for name in names[:_MAX_SHOWN]
    ]
    more = [f"{len(names) - _MAX_SHOWN} more differ"] if len(names) > _MAX_SHOWN else []
    return "; ".join(shown + more)


def check_agreement(args: RunConfig, rank: int, world_size: int, store: Any) -> None:
    """Compares the digest of all ranks' settings and versions with rank 0's through the job's
    store, before anything is built. The settings themselves travel where digests differ.

    Raises:
        VersionMismatch: on every rank; names each difference, both values and the host.
    """
    own = description(args)
    text = json.dumps(own)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if rank == 0:
        store.set("dpp/arguments", text)
        store.set("dpp/arguments/digest", digest)
        found = [store.get(f"dpp/arguments/{peer}").decode() for peer in range(1, world_size)]
        store.set("dpp/arguments/verdict", next(filter(None, found), ""))
    else:
        said = ""
        if store.get("dpp/arguments/digest").decode() != digest:
            first = json.loads(store.get("dpp/arguments").decode())
            said = differences(own, first, rank, platform.node())
        store.set(f"dpp/arguments/{rank}", said)
    verdict = store.get("dpp/arguments/verdict").decode()
    if verdict:
        raise VersionMismatch(f"{verdict}: start all nodes with equal arguments and versions")
