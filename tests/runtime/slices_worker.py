"""Train a small GPT uncut and in slices; the former to fp32's rounding, all of the latter bitwise.

Run by test_sliced_training.py, one process per rank: slices_worker.py JSON, a list of cases, see
equality_worker.py. ``slices`` is the number of tokens of a slice.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.runtime.equality_worker import (
    SEQUENCE,
    VOCABULARY,
    build,
    compare,
    hosted,
    initialize,
    start,
    train,
)

import torch  # isort: skip  # equality_worker stands in for CUDA first
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import DppConfig, DppSchedule, plugin
from megatron.dpp.runtime.static import StaticSchedule
from tests.runtime.layers import packed_params, positions
from tests.runtime.losses import token_loss


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


HOST_ROWS = (
    ((5, 6, 5), (3, 4, 6, 3), (4, 1), (16,)),
    ((2, 14), (6,), (7, 1, 8), (1, 9)),
)
"""Sequences of each step's packed rows. Those of up to 1.5 slices of 4 tokens stay whole."""


class HostStep:
    """A host's forward step of whole packed rows."""

    num_calls = 0

    def __call__(self, iterator: Any, model: Any) -> Any:
        self.num_calls += 1
        tokens, lengths = next(iterator)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        output = model(
            inputs, positions(starts, inputs.shape[1])[None], None, labels=labels,
            packed_seq_params=packed_params(starts, max(lengths)),
        )  # fmt: skip
        return output, partial(token_loss, labels % 3 > 0)


def train_host(
    case: dict[str, Any], schedule: Any, *, tells: bool, steps: Any = HOST_ROWS
) -> dict[str, Any]:
    """Two steps of a host that knows nothing of slices, and an evaluation."""
    v = case.get("v", 1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(v if v > 1 else None)
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    chunks, _ = build(case)
    found: dict[str, Any] = {"losses": [], "gradients": [], "calls": []}
    for number, rows in enumerate((*steps, steps[0])):
        drawn = torch.Generator().manual_seed(number)
        batch = [
            (torch.randint(0, VOCABULARY, (1, sum(row) + 1), generator=drawn), row) for row in rows
        ]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        if tells:
            plugin.announce(rows=rows)
        forward_step = HostStep()
        out = schedule(
            forward_step_func=forward_step, model=chunks, num_microbatches=len(rows),
            data_iterator=[iter(batch) for _ in chunks], seq_length=SEQUENCE, micro_batch_size=1,
            forward_only=number == len(steps),
        )  # fmt: skip
        found["losses"] += [each["sum"].item() for each in out]
        found["gradients"] += [b.grad_data.clone() for chunk in chunks for b in chunk.buffers]
        found["calls"].append(forward_step.num_calls)
    return found


def replayed(runs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """The runs, and if there are several, one that runs the decisions of the last again."""
    if len(runs) == 1:
        return runs
    path = str(Path(folder) / "decisions")
    return [*runs[:-1], runs[-1] | {"record": path}, {"replay": path}]


def run_host(case: dict[str, Any]) -> None:
    """An unmodified host announces the sequences of its packed rows, and they run in slices."""
    initialize(case)
    with StaticSchedule(DppConfig(), seed=1234) as schedule:
        uncut = train_host(case, schedule, tells=False)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for settings in ({"policy": "megatron"}, *replayed(case["runs"], folder)):
            with hosted(DppConfig(**settings, slice_tokens=4), []) as schedule:
                found.append(train_host(case, schedule, tells=True))
            assert found[-1]["losses"] == found[0]["losses"], settings
            pairs = zip(found[0]["gradients"], found[-1]["gradients"], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), settings
    v = case.get("v", 1)
    assert [each // v for each in found[0]["calls"]] == [13, 12, 13]
    close(uncut, found[0], {"m": len(uncut["losses"])}, case["name"])
    finish(case, "")


def finish(case: dict[str, Any], what: str) -> None:
    """Tell that a case was right, and leave its process groups."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        print(f"CASE {case['name']} ok{what}", flush=True)


def run_case(case: dict[str, Any]) -> None:
    initialize(case)
    slices = {"slice_tokens": case["slices"]}
    with StaticSchedule(DppConfig(), seed=1234) as schedule:
        uncut = train(case, schedule)
    with DppSchedule(DppConfig(policy="megatron", **slices), seed=1234) as schedule:
        expected = train(case, schedule)
    if not case.get("dropout") and not case.get("balances"):  # by slice, not by microbatch
        close(uncut, expected, case, case["name"])
    deviated = 0
    with tempfile.TemporaryDirectory() as folder:
        for settings in replayed(case["runs"], folder):
            host = settings.pop("host", False)
            config = DppConfig(**settings, **slices)
            with hosted(config, []) if host else DppSchedule(config, seed=1234) as schedule:
                got = train(case, schedule)
            compare(expected, got, f"{case['name']} with {settings}")
            moved = [0] * dist.get_world_size()
            dist.all_gather_object(moved, got["out of order"])
            deviated += any(moved)
    finish(case, f": {deviated} runs not in Megatron's order")


def main() -> None:
    start()
    for case in json.loads(sys.argv[1]):
        (run_host if case.get("rows") else run_case)(copy.deepcopy(case))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
