"""Runs an unmodified ``pretrain_gpt.py`` whose steps take the schedules of bench_turns.py in turns.

Variables: those of plugin_entry.py, and ``BENCH_ARMS``, a JSON list of [name, settings]: the host's
own schedule where these are null, else those of a :class:`~megatron.dpp.config.DppConfig`;
``BENCH_BLOCK``, steps of an arm's turn. Each rank writes a line per step to ``BENCH_RECORD.RANK``:
arm, number within the turn, seconds, bytes allocated and reserved at most.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(os.environ["BENCH_SCRIPT"]).parent), str(Path(__file__).parent)]

import torch  # noqa: E402
from plugin_entry import cut_batches  # noqa: E402

from megatron.dpp.config import DppConfig  # noqa: E402
from megatron.dpp.plugin import Plugin  # noqa: E402

SCRIPT, BLOCK = os.environ["BENCH_SCRIPT"], int(os.environ["BENCH_BLOCK"])
ON_GPU = torch.cuda.is_available()
ARMS: list[tuple[str, dict[str, Any] | None]] = json.loads(os.environ["BENCH_ARMS"])


def synchronize() -> None:
    """Wait for the GPU's work."""
    if ON_GPU:
        torch.cuda.synchronize()


def take_turns() -> None:
    """Let each step of the training loop run the schedule whose turn it is."""
    from megatron.training import training  # type: ignore[import-not-found]

    original = training.train_step
    schedules: dict[str, Plugin] = {}
    done = 0

    def step(*args: Any, **options: Any) -> Any:
        nonlocal done
        (name, settings), number = ARMS[done // BLOCK % len(ARMS)], done % BLOCK
        done += 1
        given = list(args)
        if settings is not None:
            if name not in schedules:
                schedules[name] = Plugin(DppConfig(**settings), strict=True, trace=None)
                schedules[name].remove()
            given[6] = schedules[name].run
        if ON_GPU and number == 0:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = original(*given, **options)
        synchronize()
        peaks = (
            (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            if ON_GPU
            else (0, 0)
        )
        line = [name, number, time.perf_counter() - begin, *peaks]
        with Path(f"{os.environ['BENCH_RECORD']}.{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    training.train_step = step


if os.environ["RANK"] == "0":
    logging.getLogger("megatron.dpp").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("megatron.dpp").setLevel(logging.INFO)
if os.environ.get("BENCH_LENGTHS"):
    cut_batches([int(length) for length in os.environ["BENCH_LENGTHS"].split(",")])
take_turns()
sys.argv[0] = SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
