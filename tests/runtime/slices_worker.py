"""Train a small GPT uncut and in slices; the former to fp32's rounding, all of the latter bitwise.

Run by test_sliced_training.py, one process per rank: slices_worker.py JSON, a list of cases, see
equality_worker.py. ``slices`` is the number of tokens of a slice.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.runtime.equality_worker import compare, hosted, initialize, start, train

import torch  # isort: skip  # equality_worker stands in for CUDA first
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.dpp import DppConfig, DppSchedule
from megatron.dpp.runtime.static import StaticSchedule


class AtRandom:
    """A policy that runs any task that may run."""

    def __init__(self) -> None:
        self._random = random.Random(dist.get_rank())

    def __call__(self, view: Any) -> Any:
        chunks = range(view.geometry.num_chunks)
        found = [view.forward(c) for c in chunks] + [view.backward(c) for c in chunks]
        ready = [action for action in (*found, view.weight()) if action is not None]
        return self._random.choice(ready) if ready else None


def close(uncut: dict[str, Any], cut: dict[str, Any], case: dict[str, Any], what: str) -> None:
    """Compare the first step, whose reports are those of microbatches."""
    number = case["m"]
    assert len(uncut["losses"]) == len(cut["losses"]), f"{what}: a report per microbatch"
    pairs = [(torch.tensor(each["losses"][:number]) for each in (uncut, cut))]
    pairs += [iter(pair) for pair in zip(uncut["gradients"], cut["gradients"], strict=True)]
    for wanted, got in pairs:
        if wanted.numel():
            error = ((got - wanted).norm() / wanted.norm().clamp(min=1e-3)).item()
            assert error < 1e-5, f"{what}: slices change the first step by {error:.2g}"


def run_case(case: dict[str, Any]) -> None:
    initialize(case)
    slices = {"slice_tokens": str(case["slices"])}
    with StaticSchedule(DppConfig(), seed=1234) as schedule:
        uncut = train(case, schedule)
    with DppSchedule(DppConfig(policy="megatron", **slices), seed=1234) as schedule:
        expected = train(case, schedule)
    if not case.get("dropout") and not case.get("balances"):  # by slice, not by microbatch
        close(uncut, expected, case, case["name"])
    deviated = 0
    with tempfile.TemporaryDirectory() as folder:
        record = {"record": str(Path(folder) / "decisions"), "inject": "delay:4ms"}
        for settings in (*case["runs"], record, {"replay": record["record"]}):
            host = settings.pop("host", False)
            config = DppConfig(**settings, **slices)
            with hosted(config) if host else DppSchedule(config, seed=1234) as schedule:
                got = train(case, schedule)
            compare(expected, got, f"{case['name']} with {settings}")
            moved = [0] * dist.get_world_size()
            dist.all_gather_object(moved, got["out of order"])
            deviated += any(moved)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        print(f"CASE {case['name']} ok: {deviated} runs not in Megatron's order", flush=True)


def main() -> None:
    start()
    for case in json.loads(sys.argv[1]):
        run_case(copy.deepcopy(case))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
