"""Runs an unmodified ``pretrain_gpt.py`` whose steps take the arms of bench_plugin.py in turns.

Variables: ``BENCH_SCRIPT``, its path; ``BENCH_ARMS``, a JSON list of [name, kind, settings], kind
being ``own``, ``static`` or ``dynamic``, and settings those of a ``DppConfig``; ``BENCH_BLOCK``,
steps of an arm's turn; ``BENCH_LENGTHS``, sequence lengths separated by commas, which microbatches
take in turn; ``BENCH_RECORD``, a file to write (``.RANK`` is added). A line per step: arm, number
within the turn, seconds, most bytes allocated and reserved in the turn, loss, gradient norm.

All steps read the same microbatches. Megatron-LM has no flag for unlike lengths, so these cut its
batches and set ``variable_seq_lengths``.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import logging
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SCRIPT = os.environ["BENCH_SCRIPT"]
sys.path[:0] = [str(Path(SCRIPT).parent)]

import torch  # noqa: E402

from megatron.dpp.config import DppConfig  # noqa: E402
from megatron.dpp.plugin import Plugin  # noqa: E402
from megatron.dpp.runtime.static import StaticSchedule  # noqa: E402

BLOCK = int(os.environ["BENCH_BLOCK"])
ARMS: list[tuple[str, str, dict[str, Any]]] = json.loads(os.environ["BENCH_ARMS"])
ON_GPU = torch.cuda.is_available()


def repeat_batches(lengths: Sequence[int], number: int) -> None:
    """Let the script read the same ``number`` batches in each step, cut to these lengths."""
    from megatron.core import utils
    from megatron.core.transformer import TransformerConfig
    from megatron.training import utils as training_utils  # type: ignore[import-not-found]

    original, checked = utils.get_batch_on_this_cp_rank, TransformerConfig.__post_init__
    kept: list[Any] = []
    turn = itertools.count()

    def cut(batch: dict[str, Any], *args: Any, **options: Any) -> Any:
        place = next(turn) % number
        batch = original(batch, *args, **options)
        if place == len(kept):
            kept.append(dict(batch))
        batch.update(kept[place])
        for key, tensor in batch.items() if lengths else ():
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                length = lengths[place % len(lengths)]
                square = key == "attention_mask"
                batch[key] = (
                    tensor[..., :length, :length] if square else tensor[:, :length]
                ).contiguous()
        return batch

    def with_shapes(config: Any) -> None:
        checked(config)
        config.variable_seq_lengths = bool(lengths)

    utils.get_batch_on_this_cp_rank = training_utils.get_batch_on_this_cp_rank = cut
    TransformerConfig.__post_init__ = with_shapes  # type: ignore[method-assign]


class Turn:
    """The schedule of an arm's turn; None is the host's own."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self._plugin: Plugin | None = None
        self._static: StaticSchedule | None = None
        self.schedule: Callable[..., Any] | None = None
        if kind == "dynamic":
            self._plugin = Plugin(DppConfig(**settings), strict=True, trace=None)
            self._plugin.remove()
            self.schedule = self._plugin.run
        elif kind == "static":
            self.schedule = self._static = StaticSchedule(DppConfig(**settings))

    def close(self) -> None:
        """End the schedule, and give its memory back."""
        if self._plugin is not None:
            self._plugin.leave(None)
        if self._static is not None:
            self._static.close()
        self._plugin = self._static = self.schedule = None


def synchronize() -> None:
    """Wait for the GPU's work."""
    if ON_GPU:
        torch.cuda.synchronize()


def peaks() -> tuple[int, int]:
    """The most bytes that were allocated and reserved."""
    if not ON_GPU:
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def take_turns() -> None:
    """Let each step of the training loop run the schedule whose turn it is."""
    from megatron.training import training  # type: ignore[import-not-found]

    original = training.train_step
    place = list(inspect.signature(original).parameters).index("forward_backward_func")
    done, turn = 0, Turn("own", {})

    def step(*args: Any, **options: Any) -> Any:
        nonlocal done, turn
        (name, kind, settings), number = ARMS[done // BLOCK % len(ARMS)], done % BLOCK
        done += 1
        if number == 0:
            turn.close()
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            turn = Turn(kind, settings)
        given = list(args)
        if turn.schedule is not None:
            given[place] = turn.schedule
        synchronize()
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = original(*given, **options)
        synchronize()
        took = time.perf_counter() - begin
        loss = {key: float(value) for key, value in result[0].items()}.get("lm loss")
        line = [name, number, took, *peaks(), loss, float(result[5])]
        with Path(f"{os.environ['BENCH_RECORD']}.{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    training.train_step = step


if os.environ["RANK"] == "0":
    logging.getLogger("megatron.dpp").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("megatron.dpp").setLevel(logging.INFO)
repeat_batches(
    [int(length) for length in os.environ["BENCH_LENGTHS"].split(",") if length],
    int(os.environ["BENCH_MICROBATCHES"]),
)
take_turns()
sys.argv[0] = SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
