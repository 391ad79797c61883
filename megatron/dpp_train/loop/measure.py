"""``--estimate``: the estimated time and memory of a run, and the measured ones after some
iterations.

The estimate is that of the room ``cost``. Activations are measured in PyTorch's allocator, so only
on a GPU; weights, gradients and optimizer state are the sizes of their tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron.dpp_train.cost.device import Device, cpu_device, gpu_device
from megatron.dpp_train.cost.estimate import Estimate, cut_for_memory, estimate, fitting
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.text import lines, size
from megatron.dpp_train.loop.metrics import MetricsFile
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run

_WARM_UP = {"cpu": 2, "cuda": 5}
"""Iterations before the measured one: the first allocates and compiles, on a GPU the third and
fourth may capture graphs."""


def fit_slices(run: Run, arch: str) -> RunConfig:
    """The settings; where ``--dpp-slice-tokens auto`` may run sequences whole, and the estimate
    does not fit into some rank's memory so, they always cut. A collective then.
    """
    args = run.args
    if args.dpp_slice_tokens != "auto" or not (args.use_dpp and args.holds_whole):
        return args
    shape = _shape(run, arch)
    fitted = fitting(shape, _device(run))
    needed = torch.tensor(float(fitted is not shape), device=run.device)
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    if not needed:
        return args
    shape = cut_for_memory(shape)
    run.say(f"--dpp-slice-tokens auto takes {shape.weighed.text}, by the estimate of this run")
    draft = args.draft()
    draft.holds_whole = False
    if not args.variable_lengths and shape.num_slices > 1:
        draft.dpp_slice_tokens = str(shape.weighed.tokens)
    return draft.frozen()


def _shape(run: Run, arch: str) -> RunShape:
    args = run.args
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    return shape_of(args, on_gpu=args.device == "cuda", arch=arch, per_node=per_node)


class Comparison:
    """Estimate and measurement of a run; does nothing without ``--estimate``.

    Args:
        arch: ``gpt`` or ``bert``.
    """

    def __init__(self, run: Run, trainee: Trainee, arch: str) -> None:
        self._run, self._trainee = run, trainee
        args = run.args
        self._at = min(run.iteration + _WARM_UP[run.device.type], (args.train_iters or 1) - 1)
        self._peak: int | None = None
        self._found: Estimate | None = None
        if args.estimate:
            self._found = estimate(_shape(run, arch), _device(run))
            run.say("\n".join(["", "estimate:", *lines(self._found), ""]))

    @property
    def _due(self) -> bool:
        return self._found is not None and self._run.iteration == self._at

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Measures the peak memory of a block, the forwards and backwards of the due iteration."""
        measured = self._due and self._run.device.type == "cuda"
        if measured:
            torch.cuda.reset_peak_memory_stats()
        yield
        if measured:
            self._peak = torch.cuda.max_memory_allocated() + _captured_bytes()

    def after_iteration(self, seconds: float, metrics: MetricsFile) -> None:
        """Prints the comparison once, after the measured iteration, which took ``seconds``. A
        collective then."""
        if self._found is None or self._run.iteration != self._at + 1:
            return
        mine = {
            "stage": mpu.get_pipeline_model_parallel_rank(),
            "state": state_bytes(self._trainee),
            "peak": self._peak,
            "seconds": seconds,
        }
        ranks: list[Any] = [None] * self._run.args.world_size
        dist.all_gather_object(ranks, mine)
        rows = _rows(self._found, ranks)
        text = [f"estimate and measurement, iteration {self._run.iteration}:"]
        text += [_line(*row) for row in rows]
        # The rate that makes the estimate right if all of the time goes into matrix products.
        slowest = max(rank["seconds"] for rank in ranks)
        rate = self._found.flops_per_device * self._found.seconds / slowest
        text.append(f"useful work: {rate / 1e12:.4g} TFLOP/s per device")
        self._run.say("\n  ".join(text))
        metrics.write(
            iteration=self._run.iteration,
            estimate={name: [guess, real] for name, guess, real in rows},
            bubble=self._found.bubble,
        )


def _captured_bytes() -> int:
    """Memory of CUDA graphs, which PyTorch's allocator counts as free once they are captured."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    captured = (s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return sum(s["total_size"] - s["allocated_size"] for s in captured)


def _device(run: Run) -> Device:
    if run.device.type == "cuda":
        memory = torch.cuda.get_device_properties(run.device).total_memory
        return gpu_device(torch.cuda.get_device_name(run.device), memory)
    return cpu_device(int(run.args.world_size))


def _rows(found: Estimate, ranks: list[Any]) -> list[tuple[str, float, float | None]]:
    """Name, estimate and measurement, the largest of a stage's ranks; the last row is the time."""
    rows: list[tuple[str, float, float | None]] = []
    for stage, memory in enumerate(found.ranks):
        mine = [rank for rank in ranks if rank["stage"] == stage]
        state = max(rank["state"] for rank in mine)
        rows.append((f"stage {stage}, state", memory.state, state))
        peaks = [rank["peak"] - rank["state"] for rank in mine if rank["peak"] is not None]
        guess = memory.activations + memory.keys + memory.workspace
        rows.append((f"stage {stage}, activations", guess, max(peaks, default=None)))
    rows.append(("seconds", found.seconds, max(rank["seconds"] for rank in ranks)))
    return rows


def _line(name: str, guess: float, real: float | None) -> str:
    label = {"state": "weights, gradients, optimizer", "activations": "activations and workspace"}
    stage, _, kind = name.partition(", ")
    text = f"{stage}: {label[kind]}" if kind else "time per iteration"
    show = size if kind else (lambda seconds: f"{seconds * 1e3:.1f} ms")
    if real is None:
        return f"{text}: {show(guess)} estimated, not measured without a GPU"
    error = f"{guess / real - 1:+.1%}" if real else "-"
    return f"{text}: {show(guess)} estimated, {show(real)} measured ({error})"


def state_bytes(trainee: Trainee) -> int:
    """Bytes of this rank's weights, gradients and optimizer state."""
    optimizers = getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])
    weights = sum(_local(p).nbytes for chunk in trainee.chunks for p in chunk.parameters())
    gradients = sum(_gradient_bytes(chunk) for chunk in trainee.chunks)
    return weights + gradients + sum(_optimizer_bytes(each) for each in optimizers)


def _gradient_bytes(chunk: Any) -> int:
    if hasattr(chunk, "gradient_bytes"):  # DeepSpeed's engine
        return int(chunk.gradient_bytes())
    buffers = getattr(chunk, "buffers", None)
    if isinstance(buffers, list):
        return sum(buffer.grad_data.nbytes for buffer in buffers)
    return sum(_local(p).nbytes for p in chunk.parameters())  # gradients like the parameters


def _optimizer_bytes(optimizer: Any) -> int:
    """Moments and fp32 copies of parameters; distributed and plain optimizers name these copies
    differently."""
    state = getattr(optimizer.optimizer, "state", {})
    moments = [v for each in state.values() for v in each.values() if isinstance(v, torch.Tensor)]
    copies = []
    for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
        for group in getattr(optimizer, name, ()):
            copies += [copy for copy in group if copy is not None]
    return sum(_local(tensor).nbytes for tensor in moments + copies if tensor.dim())


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
