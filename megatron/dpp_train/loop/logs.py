"""Megatron-LM's log lines, character by character, and the values for the writers. The last rank
prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.dpp.sim.batches import BatchTokens
from megatron.dpp_train.cost.flops import flops_of_lengths, flops_per_iteration
from megatron.dpp_train.loop.writers import Writers
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Run

_TIMERS = (
    "forward-backward", "forward-compute", "backward-compute", "weight-compute", "batch-generator",
    "forward-recv", "forward-send", "backward-recv", "backward-send",
    "forward-send-forward-recv", "forward-send-backward-recv",
    "backward-send-forward-recv", "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
    "embedding-grads-all-reduce", "non-tensor-parallel-grads-all-reduce",
    "conditional-embedder-grads-all-reduce", "all-grads-sync", "params-all-gather",
    "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step",
    "optimizer-copy-main-to-model-params", "optimizer",
)  # fmt: skip
"""The timers of megatron-core and the training loop, in the order of the log."""


_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": "allocated_bytes.all.peak",
    "mem-allocated-count": "allocation.all.current",
}
"""TensorBoard's names to those of ``torch.cuda.memory_stats``."""


@dataclass(kw_only=True)
class StepResult:
    """Result of one training step: ``losses`` on the last pipeline stage alone; ``grad_norm`` None
    in a skipped iteration."""

    losses: dict[str, torch.Tensor]
    skipped: bool
    grad_norm: float | None
    num_zeros: float | None = None
    params_norm: float | None = None
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    batch_size: int = 0
    tokens: BatchTokens | None = None
    """Counts of real tokens and of padding, where samples have unlike lengths."""


def tokens_of_step(args: Settings, step: StepResult) -> int:
    """Tokens of a step, without padding."""
    return step.batch_size * args.seq_length if step.tokens is None else step.tokens.real


def flops_of_step(args: Settings, step: StepResult) -> float:
    """FLOPs of a step's tokens, without padding."""
    if step.tokens is None:
        return flops_per_iteration(args, step.batch_size)
    return flops_of_lengths(args, step.tokens.real, step.tokens.squares)


@dataclass
class TrainingLog:
    """Totals since the last line, and the writers."""

    run: Run
    writers: Writers
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    advanced: int = 0
    skipped: int = 0
    nans: torch.Tensor | int = 0
    lines: int = 0
    tokens: BatchTokens = field(default_factory=BatchTokens)

    def add(self, step: StepResult) -> None:
        """Counts one iteration, and prints a line when one is due."""
        self._sum_up(step)
        run = self.run
        if run.iteration % run.args.tensorboard_log_interval == 0:
            self._write_values(step)
        if run.iteration % run.args.log_interval == 0 or self.lines == 0:
            self._print(step)
        self.writers.flush()

    def _sum_up(self, step: StepResult) -> None:
        self.advanced += not step.skipped
        self.skipped += step.skipped
        self.tokens += step.tokens or BatchTokens()
        if step.losses:
            finite = [torch.isfinite(value).all() for value in step.losses.values()]
            self.nans = self.nans + (~torch.stack(finite).all()).int()  # read when it is printed
        if step.skipped:
            return
        for name, value in step.losses.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value)) + value

    def _print(self, step: StepResult) -> None:
        # Every rank calls this: reading the timer is a barrier.
        run, args = self.run, self.run.args
        # The first line stands alone. A longer interval that it falls into keeps its totals, as in
        # Megatron-LM (which also keeps them for an interval of 1: its second line counts both).
        reset = self.lines > 0 or args.log_interval == 1
        count = self.advanced + self.skipped
        seconds = run.timers("interval-time").elapsed(barrier=True, reset=reset) / count
        parts = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}]"
            f" iteration {run.iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {run.consumed_train_samples:12d}",
        ]
        if run.skipped_train_samples:
            parts.append(f"skipped samples: {run.skipped_train_samples:12d}")
        parts.append(f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}")
        if step.tokens is not None:
            parts += [
                f"tokens: {self.tokens.real / count:.0f}",
                f"padding: {self.tokens.padding:.1%}",
                f"tokens/s: {self.tokens.real / count / seconds:.0f}",
            ]
        if args.log_throughput:
            flops = flops_of_step(args, step)
            if step.tokens is not None:
                flops = flops_of_lengths(args, self.tokens.real, self.tokens.squares) / count
            rate = flops / (seconds * 10**12 * args.world_size)
            parts.append(f"throughput per GPU (TFLOP/s/GPU): {rate:.1f}")
            self.writers.add("throughput", rate)
        parts += [
            f"learning rate: {step.learning_rate:.6E}",
            f"global batch size: {step.batch_size:5d}",
        ]
        for name, total in self.totals.items():
            average = total.item() / max(1, self.advanced)
            if average > 0.0 or not math.isfinite(average):
                parts.append(f"{name}: {average:.6E}")
        parts += self._tail(step)
        run.say_ends(" | ".join(parts) + " |")
        self._report_timers(count, reset=reset)
        if reset:
            self.totals = {name: torch.zeros_like(total) for name, total in self.totals.items()}
            self.advanced = self.skipped = self.nans = 0
            self.tokens = BatchTokens()
        self.lines += 1

    def _tail(self, step: StepResult) -> list[str]:
        norm, params = step.grad_norm, step.params_norm
        return [
            f"loss scale: {step.loss_scale:.1f}",
            *([] if norm is None else [f"grad norm: {norm:.3f}"]),
            *([] if step.num_zeros is None else [f"num zeros: {step.num_zeros}"]),
            *([] if params is None else [f"params norm: {params:.3f}"]),
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {int(self.nans):3d}",
        ]

    def _report_timers(self, count: int, *, reset: bool) -> None:
        """Milliseconds per iteration since the last line. A collective: every rank passes the same
        names, although the timers that run depend on the pipeline stage."""
        run, timers = self.run, self.run.timers
        if run.args.log_timers_to_tensorboard:
            timers.write(_TIMERS, self.writers.board, run.iteration, normalizer=count, reset=False)
        if run.args.timing_log_level:
            text = timers.get_all_timers_string(_TIMERS, normalizer=count, reset=reset)
            if text is not None:
                run.say_last(text)

    def _write_values(self, step: StepResult) -> None:
        run, args, add = self.run, self.run.args, self.writers.add
        values: dict[str, Any] = {
            "learning-rate": step.learning_rate,
            "batch-size": step.batch_size,
            **step.losses,
            "loss-scale": step.loss_scale if args.log_loss_scale_to_tensorboard else None,
            "world-size": args.world_size if args.log_world_size_to_tensorboard else None,
            "grad-norm": step.grad_norm,
            "num-zeros": step.num_zeros,
            "params-norm": step.params_norm,
        }
        for name, value in values.items():
            if value is not None:
                add(name, value, samples=True)
        for name, value in run.recorder.scalars().items():
            add(name, value)
        if args.log_memory_to_tensorboard and run.device.type == "cuda":
            statistics = torch.cuda.memory_stats()
            for name, key in _MEMORY.items():
                add(name, statistics[key])


def print_peaks(run: Run, held: float) -> None:
    """Prints the most chunk activations that each rank of the first pipeline held; a collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    peaks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(peaks, held, group=group)
    if max(peaks):
        listed = ", ".join(f"pipeline rank {rank} {peak:.4g}" for rank, peak in enumerate(peaks))
        run.say(f"dynamic pipeline: most chunk activations held: {listed}")


def print_evaluation(
    run: Run, prefix: str, losses: Mapping[str, torch.Tensor], writers: Writers
) -> None:
    """Prints Megatron-LM's framed line, `` validation loss at iteration 10 | ...``."""
    text = f" validation loss at {prefix} | "
    for name, loss in losses.items():
        value = loss.item()
        perplexity = math.exp(min(value, 20))  # in this order a NaN stays one
        text += f"{name} value: {value:.6E} | {name} PPL: {perplexity:.6E} | "
        writers.add(f"{name} validation", value, samples=True)
        if run.args.log_validation_ppl_to_tensorboard:
            writers.add(f"{name} validation ppl", perplexity, samples=True)
    writers.flush()
    frame = "-" * (len(text) + 1)
    for line in (frame, text, frame):
        run.say_last(line)
