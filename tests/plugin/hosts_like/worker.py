"""Run loops in the forms of hosts under megatron-core's schedule and under the plugin's.

Run by test_hosts_like.py, one process per rank: worker.py JSON, a list of cases. Prints ``CASE name
ok`` for each whose numbers are bitwise equal, and fails at the first that differs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import DppConfig, plugin
from megatron.dpp.errors import TransportError
from tests.plugin.hosts_like.loops import LOOPS
from tests.runtime.equality_worker import initialize, start

OWN = schedules.get_forward_backward_func
"""megatron-core's function by which hosts fetch the schedule, for steps that pass through."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One run of a case's loop, from the same seed."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        case["v"] if case.get("v", 1) > 1 else None
    )
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    calls = itertools.count()

    def fetch() -> Any:
        own = next(calls) in case.get("static_calls", ())
        return OWN() if own else schedules.get_forward_backward_func()

    return LOOPS[case["loop"]](fetch, case)


def compare(case: dict[str, Any], expected: Any, got: Any, what: str) -> None:
    """Every number of two runs must be the same."""
    name = f"{case['name']}: {what} on rank {dist.get_rank()}"
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, got), f"{name} differs: {expected} and {got}"
    elif isinstance(expected, dict):
        for key in expected.keys() | got.keys():
            compare(case, expected[key], got[key], f"{what} {key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got), f"{name}: {len(expected)} and {len(got)} entries"
        for index, pair in enumerate(zip(expected, got, strict=True)):
            compare(case, *pair, f"{what} {index}")
    else:
        assert expected == got, f"{name}: {expected} and {got}"


def fail(case: dict[str, Any]) -> None:
    """Run with settings under which a rank fails; each rank's error must name the reason."""
    for settings, rank, reason in case.get("fails", ()):
        try:
            with plugin.installed(DppConfig(**settings), strict=True):
                run(case | {"failing": rank == dist.get_rank()})
        except Exception as error:
            assert reason in str(error), error
            assert dist.get_rank() == rank or isinstance(error, TransportError), error
        else:
            raise AssertionError(f"{case['name']}: no error on rank {dist.get_rank()}")
        dist.barrier()


def run_case(case: dict[str, Any]) -> None:
    initialize(case)
    expected = run(case)
    fail(case)
    for settings in case["runs"]:
        with plugin.installed(DppConfig(**settings), strict=True):
            got = run(case)
        if "-v" in sys.argv:
            print(case["name"], dist.get_rank(), expected["norms"], got["norms"], flush=True)
        compare(case, expected, got, f"with {settings},")


def main(run_case: Callable[[dict[str, Any]], None]) -> None:
    """Run all cases of the command line."""
    start()
    for case in json.loads(sys.argv[1]):
        run_case(case)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        if dist.get_rank() == 0:
            print(f"CASE {case['name']} ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run_case)
