"""From checked arguments to a process that is part of the job: device, process groups, seeds,
calculators.

Called once per process by ``pretrain``. Everything it builds is in the :class:`Run` it returns;
the process groups live in megatron-core's ``parallel_state``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.dpp.tokenizers import Tokenizer
from megatron.dpp.train.loss_check import LossCheck
from megatron.dpp.train.same_start import check_agreement

Args = argparse.Namespace


@dataclass
class Run:
    """What the parts of a training run share.

    ``iteration``, ``consumed_train_samples`` and ``consumed_valid_samples`` are the run's
    progress, as checkpoints hold it; ``flops_so_far`` counts floating point operations since
    iteration 0.
    """

    args: Args
    rank: int
    device: torch.device
    timers: Any
    recorder: Any = None
    tokenizer: Tokenizer | None = None
    cpu_support: Any = None
    loss_check: LossCheck = field(default_factory=LossCheck)
    iteration: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    flops_so_far: float = 0.0
    start_time: float = field(default_factory=time.time)

    @property
    def is_first(self) -> bool:
        """Rank 0: prints what concerns the whole job."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank: it holds the losses and prints the log lines, as in Megatron-LM."""
        return self.rank == int(self.args.world_size) - 1

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.is_first:
            _print_line(text)

    def say_stage(self, text: str) -> None:
        """Print on the first rank of every pipeline stage, with its number on all but rank 0."""
        from megatron.core import parallel_state

        if self.is_first:
            _print_line(text)
        elif (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        ):
            _print_line(f"[rank {self.rank}] {text}")

    def say_last(self, text: str) -> None:
        """Print on the last rank."""
        if self.is_last:
            _print_line(text)

    @contextlib.contextmanager
    def timed(self, timer: str, level: int, barrier: bool = False) -> Iterator[None]:
        """One of Megatron-LM's timers around a block; it runs with ``--timing-log-level`` from
        ``level`` on."""
        self.timers(timer, log_level=level).start(barrier=barrier)
        yield
        self.timers(timer).stop()


def _print_line(text: str) -> None:
    """In one write, so that two ranks' lines do not run into each other; on a terminal the progress
    line gives way."""
    erase = "\r\x1b[K" if sys.stdout.isatty() else ""
    sys.stdout.write(erase + text + "\n")
    sys.stdout.flush()


def initialize(
    args: Args, rank: int, embedding_ranks: Callable[[list[int]], list[int]] | None = None
) -> Run:
    """Join the job.

    Args:
        embedding_ranks: which of a pipeline's ranks hold word embeddings; megatron-core's rule
            when None.
    """
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.safe_globals import register_safe_globals
    from megatron.core.timers import Timers

    cpu_support = None
    if args.device == "cpu":
        from megatron.dpp.mcore.cpu import install

        cpu_support = install()
    if args.gradient_accumulation_fusion:
        from megatron.dpp.mcore.wgrad import fused as fused_wgrad

        fused_wgrad.provide()
    if args.deterministic_mode:
        _use_deterministic_kernels()
    device = _join_process_group(args, rank)
    check_agreement(args, rank, args.world_size, dist.distributed_c10d._get_default_store())
    groups: dict[str, Any] = {"get_embedding_ranks": embedding_ranks} if embedding_ranks else {}
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
        **groups,
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
    _switch_reruns_off()
    timers = Timers(args.timing_log_level, args.timing_log_option)
    return Run(args=args, rank=rank, device=device, timers=timers, cpu_support=cpu_support)


def _use_deterministic_kernels() -> None:
    """``--deterministic-mode``: equal inputs give equal bits, at some cost in speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is opened
    torch.use_deterministic_algorithms(True)


def _join_process_group(args: Args, rank: int) -> torch.device:
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
    if "MASTER_ADDR" not in os.environ:  # one process, no launcher
        options["store"] = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(**options)
    return device


def set_seeds(args: Args) -> None:
    """Megatron-LM's seeds: by pipeline rank, then the tensor-parallel generators."""
    from megatron.core import parallel_state, tensor_parallel

    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, args.te_rng_tracker, args.inference_rng_tracker
    )


def _switch_reruns_off() -> None:
    """megatron-core's gradient checks go through its re-run machine; here a bad gradient stops the
    run at once."""
    from megatron.core import rerun_state_machine

    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
