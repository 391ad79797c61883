"""A task's random state follows from what the task is, not from when it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import rng
from megatron.dpp.core.rng import TaskRng

NAMES = ("model-parallel-rng", "expert-parallel-rng")
"""Generators of which each tensor-parallel rank, or each rank of an expert group, has its own."""


class Generators:
    """megatron-core's tracker and the default generator, without a process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
        self.tensor_rank = self.expert_rank = self.context_rank = 0
        self.default = torch.Generator()
        tracker: Any = SimpleNamespace(states_={name: torch.Generator() for name in NAMES})
        if saved:  # the tracker's other form: states, not generators
            tracker.states_ = {name: one.get_state() for name, one in tracker.states_.items()}
        self.tracker = tracker
        groups = SimpleNamespace(
            get_tensor_model_parallel_rank=lambda: self.tensor_rank,
            get_expert_tensor_and_model_parallel_rank=lambda: self.expert_rank,
            get_context_parallel_rank=lambda: self.context_rank,
        )
        monkeypatch.setattr(rng, "get_cuda_rng_tracker", lambda: tracker)
        monkeypatch.setattr(rng, "parallel_state", groups)
        monkeypatch.setattr(torch.cuda, "manual_seed", self.default.manual_seed)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.default.get_state)

    def draw(self) -> dict[str, float]:
        """The next number of each generator."""
        drawn = {"default": torch.rand((), generator=self.default).item()}
        for name, state in self.tracker.states_.items():
            one = state if isinstance(state, torch.Generator) else torch.Generator()
            if one is not state:
                one.set_state(state)
            drawn[name] = torch.rand((), generator=one).item()
        return drawn


@pytest.fixture(params=[False, True], ids=["generators", "saved states"])
def generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generators:
    return Generators(monkeypatch, request.param)


def draw_in_tasks(
    generators: Generators,
    *,
    seed: int = 1,
    rank: int = 0,
    iteration: int = 0,
    tensor_rank: int = 0,
    expert_rank: int = 0,
) -> list[dict[str, float]]:
    """The first draws of the forwards of two chunks and two microbatches, on one of two ranks."""
    chunks: list[torch.nn.Module] = [torch.nn.Identity(), torch.nn.Identity()]
    drawn: list[dict[str, float]] = []
    generators.tensor_rank, generators.expert_rank = tensor_rank, expert_rank
    seeded = TaskRng(seed, num_ranks=2, rank=rank).wrap(
        lambda *given: drawn.append(generators.draw()), chunks, iteration
    )
    for chunk in (0, 1, 1, 0):
        seeded(None, chunks[chunk])
    return drawn


def test_chunks_are_told_apart_without_a_stage_number(generators: Generators) -> None:
    """Modules without ``vp_stage`` do not all count as chunk 0."""
    chunks: list[torch.nn.Module] = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    own = {
        (name, number): torch.Generator().manual_seed(rng.derive(1, 0, number, stage))
        for name, stage in (("a", 2), ("b", 6))
        for number in range(3)
    }
    expected = {task: torch.rand((), generator=one).item() for task, one in own.items()}
    drawn: list[float] = []
    for order in ("aabbab", "ababab", "bbaaab"):
        drawn.clear()
        seeded = TaskRng(1, num_ranks=4, rank=2).wrap(
            lambda *given: drawn.append(generators.draw()["default"]), chunks, 0
        )
        for name in order:
            seeded(None, chunks["ab".index(name)])
        tasks = [(name, order[:place].count(name)) for place, name in enumerate(order)]
        assert dict(zip(tasks, drawn, strict=True)) == expected


def test_the_forward_step_gets_all_that_it_is_given(generators: Generators) -> None:
    chunk = torch.nn.Linear(1, 1)
    given: list[dict[str, Any]] = []
    seeded = TaskRng(1, 1, 0).wrap(lambda *rest, **options: given.append(options), [chunk], 0)
    seeded(None, chunk, return_schedule_plan=True)
    assert given == [{"return_schedule_plan": True}]


def test_every_task_and_generator_draws_numbers_of_its_own(generators: Generators) -> None:
    drawn = [
        number
        for seed in (-5, 1, 5)
        for rank in (0, 1)
        for iteration in (0, 1)
        for task in draw_in_tasks(generators, seed=seed, rank=rank, iteration=iteration)
        for number in task.values()
    ]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 2 * 4 * 3


def test_context_parallel_ranks_draw_numbers_of_their_own(generators: Generators) -> None:
    drawn: list[float] = []
    for generators.context_rank in range(4):
        drawn += [number for task in draw_in_tasks(generators) for number in task.values()]
    assert len(set(drawn)) == len(drawn) == 4 * 4 * 3


def test_ranks_of_a_group_differ_in_their_own_generator_alone(generators: Generators) -> None:
    for name, group in zip(NAMES, ("tensor_rank", "expert_rank"), strict=True):
        ranks = [draw_in_tasks(generators, **{group: rank}) for rank in range(3)]
        for task in zip(*ranks, strict=True):
            for other in ("default", *NAMES):
                assert len({one[other] for one in task}) == (3 if other == name else 1)


def test_a_task_draws_the_same_whatever_ran_before_it(generators: Generators) -> None:
    first = draw_in_tasks(generators)
    generators.draw()
    assert draw_in_tasks(generators) == first


def test_seeds_are_equal_on_every_machine() -> None:
    """A resumed run draws the numbers that an uninterrupted run draws."""
    assert rng.derive(1, 2, 3, 4) == 7597657864365363701
    assert rng.derive(1, 2, 3, 4, 0, name="model-parallel-rng") == 3200291550365815258


@pytest.mark.parametrize(
    ("settings", "forward_only", "needed"),
    [
        ({}, False, False),
        ({"hidden_dropout": 0.1}, False, True),
        ({"attention_dropout": 0.1}, False, True),
        ({"hidden_dropout": 0.1}, True, False),
        ({"moe_input_jitter_eps": 0.1}, True, True),
        ({"moe_router_force_load_balancing": True}, True, True),
    ],
)
def test_tasks_are_seeded_where_a_forward_draws(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], forward_only: bool, needed: bool
) -> None:
    given = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
    }  # fmt: skip
    monkeypatch.setattr(rng, "get_model_config", lambda _: SimpleNamespace(**given | settings))
    assert rng.needs_task_rng([torch.nn.Identity()], forward_only=forward_only) is needed
