"""State that the parts of a run share: settings, rank, clock, console, tokenizer, progress."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp_train.optimizer.grad_checks import on_the_way
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.tokenizers import Tokenizer

_LINE_BYTES = 1024
"""Room for a log line that the last rank sends to rank 0."""


class LossCheck:
    """Finds a training loss of this rank that is NaN or infinite.

    A loss on a GPU is read when a later one is added and its copy has arrived; the rest is waited
    for when the step is launched. Reading each at once would let every forward of the last stage
    end before the next task could be launched. A loss on a CPU is read at once.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.Tensor, Any]] = deque()
        self._iteration = -1

    def add(self, loss: torch.Tensor, iteration: int) -> float | None:
        """Takes the loss of one microbatch, a scalar; forgets unread ones of earlier iterations.

        Returns:
            The first loss found that is not finite, None without one.
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._unread.clear()
        self._unread.append(on_the_way(loss.detach()))
        return self._read(wait=False)

    def rest(self) -> float | None:
        """Waits for all losses; the first that is not finite, None without one."""
        return self._read(wait=True)

    def _read(self, *, wait: bool) -> float | None:
        while self._unread:
            value, event = self._unread[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return None
            self._unread.popleft()
            if not math.isfinite(value.item()):
                return value.item()
        return None


@dataclass(kw_only=True)
class Progress:
    """Counts of a run that its checkpoints hold among the arguments. A checkpoint without one gives
    it its value here."""

    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0


PROGRESS = {each.name: each.default for each in fields(Progress)}
"""Field of :class:`Progress` -> its value in a new run."""


@dataclass
class Run(Progress):
    """State that the parts of a training run share.

    ``iteration`` is the run's progress, too; ``flops_so_far`` counts floating point operations
    since iteration 0. ``args`` never change.
    """

    args: RunConfig
    rank: int
    device: torch.device
    timers: Any
    recorder: Any = None
    tokenizer: Tokenizer | None = None
    cpu_support: Any = None
    loss_check: LossCheck = field(default_factory=LossCheck)
    iteration: int = 0
    flops_so_far: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def is_first(self) -> bool:
        """Rank 0, which prints what concerns the whole job."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank, which holds the losses and prints the log lines, as in Megatron-LM."""
        return self.rank == int(self.args.world_size) - 1

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.is_first:
            _print_line(text)

    def say_stage(self, text: str) -> None:
        """Prints on the first rank of every pipeline stage, with its number on all but rank 0."""
        if self.is_first:
            _print_line(text)
        elif (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        ):
            _print_line(f"[rank {self.rank}] {text}")

    def say_last(self, text: str) -> None:
        """Prints on the last rank."""
        if self.is_last:
            _print_line(text)

    def say_ends(self, text: str) -> None:
        """Prints on the last rank, and on rank 0 if that is on another node: a collective there."""
        self.say_last(text)
        world_size = int(self.args.world_size)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) >= world_size:
            return
        line = torch.zeros(_LINE_BYTES, dtype=torch.uint8)
        if self.is_last:
            data = text.encode()[:_LINE_BYTES]
            line[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        line = line.to(self.device)
        dist.broadcast(line, src=world_size - 1)
        self.say(bytes(line.tolist()).rstrip(b"\0").decode(errors="ignore"))

    @contextlib.contextmanager
    def timed(self, timer: str, *, level: int, barrier: bool = False) -> Iterator[None]:
        """Runs one of Megatron-LM's timers around a block, from ``--timing-log-level`` ``level``
        on."""
        self.timers(timer, log_level=level).start(barrier=barrier)
        yield
        self.timers(timer).stop()


def _print_line(text: str) -> None:
    """Prints in one write, so that lines of two ranks do not mix; erases a progress line."""
    erase = "\r\x1b[K" if sys.stdout.isatty() else ""
    sys.stdout.write(erase + text + "\n")
    sys.stdout.flush()


def ends(vp_stage: int | None) -> tuple[bool, bool]:
    """Tells whether a chunk is the first and whether it is the last of the pipeline."""
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(
        **where
    )


def note_progress(run: Run, text: str) -> None:
    """Adds a line to ``progress.txt`` in the ``--save`` directory, with ``--log-progress``."""
    args = run.args
    if not (args.log_progress and args.save and run.is_first):
        return
    path = Path(args.save) / "progress.txt"
    job = f"Job ID: {os.environ.get('SLURM_JOB_ID', '')}\t# GPUs: {args.world_size}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_text_to_write(path, append=True) as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{job}\t{text}\n")
    except OSError as error:  # of a line for people, not of what it reports
        run.say(f"warning: {path}: {error.strerror}")
