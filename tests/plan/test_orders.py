"""The planner of microbatches' order: what it picks, in its own process too."""

from __future__ import annotations

import random

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp.plan.batches import BatchPlans, BatchSettings
from megatron.dpp.plan.orders import OrderPlanner, PipelineModel, plan_order
from megatron.dpp.sim.lengths import LengthCosts, sft

COSTS = LengthCosts.transformer(1024)


def drawn(seed: int, count: int = 16) -> list[list[int]]:
    rng = random.Random(seed)
    return [[sft(rng)] for _ in range(count)]


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
        planner.ask(16, drawn(1))
        assert planner.take(0, drawn(0)) == plan_order(model("dynamic"), drawn(0))
        assert planner.take(16, drawn(1)) == plan_order(model("dynamic"), drawn(1))
        assert planner._process is not None
        planner._process.kill()
        assert planner.take(32, drawn(2)) == plan_order(model("dynamic"), drawn(2))
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
