"""The planner of microbatches' order: what it picks, in its own process too."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import psutil
import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp.sim import orders as module
from megatron.dpp.sim.batches import BatchPlans, BatchSettings
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.sim.orders import OrderPlanner, PlannedOrder, Question, plan_order
from megatron.dpp.sim.pipeline_model import PipelineModel

COSTS = LengthCosts.transformer(1024)


def drawn(seed: int, count: int = 16) -> list[list[int]]:
    rng = random.Random(seed)
    return [[sft(rng)] for _ in range(count)]


def asked(microbatches: Any) -> Question:
    """Of whole microbatches."""
    return Question({0: microbatches}, {})


def model(policy: str | None, num_chunks: int = 2, num_ranks: int = 2) -> PipelineModel:
    return PipelineModel(
        num_ranks=num_ranks, num_chunks=num_chunks, longest=16384, policy=policy, costs=COSTS
    )


@pytest.mark.parametrize("policy", [None, "dynamic", "depth-first"])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_is_never_slower_than_the_drawn_order(
    policy: str | None, num_chunks: int, seed: int
) -> None:
    microbatches, one = drawn(seed), model(policy, num_chunks)
    found = plan_order(one, microbatches)
    ordered = [microbatches[i] for i in found.order]
    assert sorted(found.order) == list(range(16))
    assert one.seconds(ordered, found.policy) <= one.seconds(microbatches)
    assert found.policy in (None, "megatron") and (policy == "dynamic" or found.policy is None)


def test_sorting_gains_for_a_static_schedule() -> None:
    microbatches, one = drawn(3, 32), model(None, num_ranks=4)
    found = plan_order(one, microbatches)
    assert found.name != "drawn"
    ordered = [microbatches[i] for i in found.order]
    assert one.seconds(ordered) < 0.9 * one.seconds(microbatches)


def test_one_rank_and_equal_lengths_keep_the_drawn_order() -> None:
    assert plan_order(model("dynamic", 1, 1), drawn(0)).name == "drawn"
    assert plan_order(model("dynamic"), [[512]] * 8).name == "drawn"


def test_another_process_plans_the_same() -> None:
    planner = OrderPlanner(model("dynamic"))
    try:
        planner.ask(16, asked(drawn(1)))
        assert planner.take(0, asked(drawn(0))) == plan_order(model("dynamic"), drawn(0))
        assert planner.take(16, asked(drawn(1))) == plan_order(model("dynamic"), drawn(1))
        (process,) = (
            each for each in psutil.Process().children() if module.__name__ in each.cmdline()
        )
        process.kill()
        assert planner.take(32, asked(drawn(2))) == plan_order(model("dynamic"), drawn(2))
    finally:
        planner.close()
        planner.close()


def test_batches_are_planned_a_step_ahead() -> None:
    lengths = [each[0] for each in drawn(5, 48)]
    settings = BatchSettings(num_ranks=2, order="planned", costs=COSTS)
    with pytest.raises(ConfigError, match="needs a planner"):
        BatchPlans(lambda a, b: lengths[a:b], 16, 0, settings)
    planner = OrderPlanner(model("dynamic"))
    plans = BatchPlans(lambda a, b: lengths[a:b], 16, 0, settings, planner)
    try:
        for first in (0, 16, 32):
            batch = [[length] for length in lengths[first : first + 16]]
            expected = plan_order(model("dynamic"), batch)
            assert plans.microbatches(first) == [[first + i] for i in expected.order]
            assert plans.own_lengths(first) == [batch[i] for i in expected.order]
            assert plans.policy(first) == expected.policy
    finally:
        plans.close()


def found_with(
    times: dict[tuple[str, str | None], float], monkeypatch: Any, num_ranks: int = 2
) -> PlannedOrder:
    """The plan of two microbatches where orders and policies take these times, others 10."""

    def seconds(own: Any, microbatches: Any, policy: str | None = None) -> float:
        name = {(1, 2): "drawn", (2, 1): "turned"}[tuple(each[0] for each in microbatches)]
        return times.get((name, policy), 10.0)

    monkeypatch.setattr(module, "orders", lambda *_: {"drawn": [0, 1], "turned": [1, 0]})
    monkeypatch.setattr(PipelineModel, "seconds", seconds)
    return plan_order(model("dynamic", num_ranks=num_ranks), [[1], [2]])


@pytest.mark.parametrize(
    ("times", "name", "policy"),
    [
        ({}, "drawn", None),
        ({("turned", None): 9.0}, "turned", None),
        ({("turned", None): 9.99}, "drawn", None),
        ({("turned", None): 9.97}, "turned", None),
        ({("drawn", "megatron"): 9.0}, "drawn", "megatron"),
        ({("turned", "megatron"): 9.0}, "turned", "megatron"),
        ({("turned", "megatron"): 9.0, ("turned", None): 9.01}, "turned", None),
        ({("turned", "megatron"): 9.0, ("turned", None): 9.03}, "turned", "megatron"),
    ],
)
def test_another_order_or_policy_must_gain_two_thousandths(
    times: dict[tuple[str, str | None], float], name: str, policy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = found_with(times, monkeypatch)
    assert (found.name, found.policy) == (name, policy)
    assert found.order == ([0, 1] if name == "drawn" else [1, 0])


def test_steps_of_many_tasks_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """F, B and W of 2 microbatches in 2 chunks: 99,996 and 100,008 tasks."""
    for num_ranks, name in ((8333, "turned"), (8334, "drawn")):
        found = found_with({("turned", None): 1.0}, monkeypatch, num_ranks)
        assert found.name == name


class Pipe:
    """The planner's process: answers each line by the lengths in it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.lines: list[str] = []
        self.answers: list[str] = []
        self.stdin = self.stdout = self

    def write(self, line: str) -> None:
        value = json.loads(line)
        self.lines.append(line)
        if "ways" in value:
            ((_, rows),) = value["ways"]
            self.asked.append(rows)
            answer = {"order": rows[0], "name": "n", "policy": None, "choice": None}
            self.answers.append(json.dumps(answer))

    def flush(self) -> None: ...

    def kill(self) -> None:
        self.answers.clear()

    def communicate(self) -> None: ...

    def readline(self) -> str:
        return self.answers.pop(0) + "\n" if self.answers else ""


def test_each_key_is_asked_once_and_gets_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, pipe = OrderPlanner(model("dynamic")), Pipe()
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pipe)
    for key in (1, 2, 3, 2):
        planner.ask(key, asked([[key]]))
    assert pipe.asked == [[[1]], [[2]], [[3]]]
    assert planner.take(2, asked([[2]])).order == [2]
    planner.ask(2, asked([[2]]))
    assert [planner.take(key, asked([[key]])).order for key in (3, 1, 2, 4)] == [[3], [1], [2], [4]]
    assert pipe.asked == [[[1]], [[2]], [[3]], [[4]]]


def test_the_newest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, pipe = OrderPlanner(model("dynamic")), Pipe()
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pipe)
    for key in range(20):
        assert planner.take(key, asked([[key]])).order == [key]
    pipe.asked.clear()
    assert [planner.take(key, asked([[key]])).order for key in range(12, 20)] == [
        [k] for k in range(12, 20)
    ]
    assert not pipe.asked
    planner.take(11, asked([[11]]))
    assert pipe.asked == [[[11]]]


def test_a_process_that_is_gone_is_replaced_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, pipe = OrderPlanner(model("dynamic")), Pipe()
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pipe)
    planner.ask(1, asked([[1]]))
    planner.ask(2, asked([[2]]))
    pipe.answers.clear()
    monkeypatch.setattr(
        module, "plan_batch", lambda _, given: PlannedOrder(list(given.ways[0][0]), "own")
    )
    assert planner.take(2, asked([[2]])) == PlannedOrder([2], "own")
    pipe.asked.clear()
    assert planner.take(1, asked([[1]])).order == [1], "an answer that was lost is asked for again"
    assert pipe.asked == [[[1]]]


def test_a_planner_that_was_closed_asks_the_next_process_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, first, second = OrderPlanner(model("dynamic")), Pipe(), Pipe()
    processes = iter([first, second])
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: next(processes))
    planner.ask(1, asked([[1]]))
    planner.close()
    assert planner.take(1, asked([[1]])).order == [1] and second.asked == [[[1]]]


def test_a_model_survives_its_way_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs are those of the run, also in a process that reads JSON."""
    costs = LengthCosts(fixed=3.0, per_token=(1.0, 2.0, 0.5), per_square=(0.1, 0.2, 0.0))
    sent = PipelineModel(
        num_ranks=3, num_chunks=2, longest=64, policy="depth-first", cap="strict",
        split_backward=False, costs=costs, overhead=0.25,
    )  # fmt: skip
    pipe, found = Pipe(), list[Any]()
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pipe)
    OrderPlanner(sent).ask(1, asked([[1]]))
    monkeypatch.setattr(
        module, "plan_batch",
        lambda model, given: found.append((model, given)) or PlannedOrder([0], "n"),
    )  # fmt: skip
    answers = io.StringIO()
    module.serve(io.StringIO("".join(pipe.lines)), answers)
    assert found == [(sent, asked([[1]]))]
    assert json.loads(answers.getvalue())["order"] == [0]
