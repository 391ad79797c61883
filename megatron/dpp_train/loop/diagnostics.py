"""Profiles, memory reports, warnings of spiky losses, a progress line."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from tqdm import tqdm

from megatron.dpp_train.loop.logs import StepResult
from megatron.dpp_train.state import Run

_SPIKE = 10.0
_REMEMBERED_LOSSES = 100
_PROGRESS = "iteration {n_fmt}/{total_fmt} ({percentage:.0f} %), {rate_inv_fmt}, {remaining} left"


class Diagnostics:
    """Carries out ``--profile``, ``--log-memory-interval``, ``--check-for-spiky-loss``,
    ``--train-sync-interval`` and ``--logging-level``.

    On a terminal rank 0 also draws a progress line at the bottom. Log lines, which other processes
    may print, erase it; the next iteration draws it again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._profile = _Profile(run) if run.args.profile else None
        self._losses: deque[float] = deque(maxlen=_REMEMBERED_LOSSES)
        self._progress = tqdm(
            initial=run.iteration,
            total=run.args.train_iters,
            bar_format=_PROGRESS,
            smoothing=0,
            leave=False,
            file=sys.stdout,
            disable=not (run.is_first and sys.stdout.isatty()),
        )
        if run.args.logging_level is not None:
            logging.getLogger().setLevel(run.args.logging_level)

    def before_step(self) -> None:
        """Called before the step that completes iteration ``run.iteration + 1``."""
        if self._profile is not None:
            self._profile.before(self._run.iteration)

    def after_step(self, step: StepResult) -> None:
        """Called after a step, which ``run.iteration`` counts."""
        run, args = self._run, self._run.args
        sync = args.train_sync_interval
        if sync and run.iteration % sync == 0:
            torch.cuda.synchronize()
        if args.log_memory_interval and run.iteration % args.log_memory_interval == 0:
            self._report_memory()
        if args.check_for_spiky_loss and not step.skipped:
            self._look_for_spike(step)
        self._progress.update(run.iteration - self._progress.n)

    def _report_memory(self) -> None:
        if mpu.get_data_parallel_rank() != 0 or self._run.device.type != "cuda":
            return
        mib = 2**20
        print(
            f"[Rank {self._run.rank}] (after {self._run.iteration} iterations) memory (MB) | "
            f"allocated: {torch.cuda.memory_allocated() / mib:.2f} | "
            f"max allocated: {torch.cuda.max_memory_allocated() / mib:.2f} | "
            f"reserved: {torch.cuda.memory_reserved() / mib:.2f} | "
            f"max reserved: {torch.cuda.max_memory_reserved() / mib:.2f}",
            flush=True,
        )

    def _look_for_spike(self, step: StepResult) -> None:
        if not self._run.is_last or "lm loss" not in step.losses:
            return
        loss = float(step.losses["lm loss"].item())
        largest = max(self._losses, default=loss)
        if loss > _SPIKE * largest:
            self._run.say_last(
                f"warning: iteration {self._run.iteration}: lm loss {loss:.6E} is more than "
                f"{_SPIKE:g} times the largest of the {len(self._losses)} before it ({largest:.6E})"
            )
        if math.isfinite(loss):  # nothing is above infinity or "not a number"
            self._losses.append(loss)

    def close(self) -> None:
        """Ends an open profile and erases the progress line; calling it twice is fine."""
        if self._profile is not None:
            self._profile.close()
        self._progress.close()


class _Profile:
    """PyTorch's profiler (``--use-pytorch-profiler``) or CUDA's for Nsight, on ``--profile-ranks``
    between ``--profile-step-start`` and ``--profile-step-end``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._open: Any = None
        self._wanted = run.rank in run.args.profile_ranks

    def before(self, iteration: int) -> None:
        args = self._run.args
        if not self._wanted:
            return
        if iteration >= args.profile_step_end:
            self.close()
        elif iteration >= args.profile_step_start and self._open is None:
            self._open = self._start()

    def _start(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        if self._run.args.use_pytorch_profiler:
            profiler = torch.profiler.profile()
            stack.callback(self._export, profiler)
            stack.enter_context(profiler)
        elif self._run.device.type == "cuda":
            stack.enter_context(torch.cuda.profiler.profile())
            stack.enter_context(torch.autograd.profiler.emit_nvtx())  # type: ignore[no-untyped-call]
        return stack

    def _export(self, profiler: Any) -> None:
        args = self._run.args
        folder = Path(args.tensorboard_dir or args.trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"profile-rank{self._run.rank}.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        print(f"profile of rank {self._run.rank}: {path}", flush=True)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open, self._wanted = None, False
