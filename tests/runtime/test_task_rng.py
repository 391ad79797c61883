"""A task's random state follows from what the task is, not from when it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.dpp.mcore.rng import TaskRng


def test_chunks_are_told_apart_without_a_stage_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules without ``vp_stage`` all counted as chunk 0: masks followed the order of tasks."""
    chunks: list[torch.nn.Module] = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        TaskRng, "_enter", lambda self, *task: seen.append((name, task[1], task[2]))
    )
    orders = {}
    for order in ("aabbab", "ababab", "bbaaab"):
        seeded = TaskRng(1, num_ranks=4, rank=2).wrap(lambda *given: None, chunks, 0)
        seen.clear()
        for name in order:
            seeded(None, chunks["ab".index(name)])
        orders[order] = sorted(seen)
    first = [("a", i, 2) for i in range(3)] + [("b", i, 6) for i in range(3)]
    assert all(tasks == first for tasks in orders.values())


def test_the_forward_step_gets_all_that_it_is_given() -> None:
    chunk = torch.nn.Linear(1, 1)
    given: list[dict[str, Any]] = []
    rng = TaskRng(1, num_ranks=1, rank=0)
    rng._enter = lambda *task: None  # type: ignore[method-assign]
    seeded = rng.wrap(lambda *rest, **options: given.append(options), [chunk], 0)
    seeded(None, chunk, return_schedule_plan=True)
    assert given == [{"return_schedule_plan": True}]
