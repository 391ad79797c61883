"""megatron-core's schedule behind ours: tasks that are prolonged, and slots of graphs.

test_equality.py compares its numbers, and test_lifetimes.py opens its links.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.inject import Task
from megatron.dpp.runtime import static
from megatron.dpp.runtime.static import StaticSchedule
from megatron.dpp.runtime.static_exchange import Step
from megatron.dpp.runtime.topology import Topology


def test_tasks_cost_a_share_of_the_rank_and_a_backward_twice_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the dynamic schedule, so that delays cover the same share of the work. Tasks are
    timed although nothing is chosen by it: a factor is one of the task's own time.
    """
    tasks, timed, after = list[Task](), list[Any](), list[Any]()
    injector = SimpleNamespace(
        delays_messages=False, factor=lambda task: tasks.append(task) or 1.5, seconds=lambda _: 0.25
    )
    timer = SimpleNamespace(
        prolong=lambda *given: timed.append(given), launched=lambda key: timed.append(key)
    )
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 4))
    monkeypatch.setattr(static, "around_steps", lambda _, one: nullcontext(after.append(one)))
    monkeypatch.setattr(static, "static_schedule", lambda *_: lambda **given: [])
    monkeypatch.setattr(static, "Injector", lambda *_, **__: injector)
    monkeypatch.setattr(static, "timer_for", lambda *, follow: timer if follow else None)
    monkeypatch.setattr("megatron.dpp.runtime.base.needs_task_rng", lambda *_, **__: False)
    own = StaticSchedule(DppConfig(inject="delay:1ms"), seed=1)
    own.iteration = 9
    for _ in range(2):
        own(model=torch.nn.Identity(), forward_step_func=None)
    for step in (Step("F", 0, 1), Step("B", 3, 2), Step("F", 2, 3)):
        after[0](step, None)
    after[1](Step("F", 0, 0), None)
    assert tasks == [
        Task(9, "F", 0, 1, 0.0, 0.25), Task(9, "B", 3, 2, 0.25, 0.5),
        Task(9, "F", 2, 3, 0.75, 0.25), Task(10, "F", 0, 0, 0.0, 0.25),
    ]  # fmt: skip
    assert timed[:2] == [(("F", 0), 1.5, 0.25), ("F", 0)] and len(timed) == 8


@pytest.mark.parametrize(("group", "most"), [(None, 5), (0, 5), (2, 5), (4, 7)])
def test_graphs_have_slots_for_the_groups_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, group: int | None, most: int
) -> None:
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 2))
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=group)
    call: Any = SimpleNamespace(
        model=[], pg_collection=None, num_microbatches=8, forward_only=False, config=config,
        cut=None,
    )  # fmt: skip
    assert static.most_held(call) == most, "the warm-up of a larger group holds more"
