"""Plans of global batches: shapes of microbatches, shares of replicas, calls of a planner."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.sim.batches import BatchPlans, BatchSettings, BatchTokens, share_batch
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.orders import PlannedOrder


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 8),
    st.lists(st.integers(1, 90), max_size=3).map(sorted).map(tuple),
    st.booleans(),
)
def test_rows_hold_their_sequences_in_the_least_allowed_width(lengths, multiple, buckets, packed):
    plan = BatchSettings(
        packing="even" if packed else "none", length_multiple=multiple, buckets=buckets
    )
    rows, width = plan.shape(lengths)
    needed = sum(lengths) if packed else max(lengths)
    assert rows == (1 if packed else len(lengths))
    padded = next(n for n in range(needed, needed + multiple) if n % multiple == 0)
    assert width == min((b for b in buckets if b >= padded), default=padded)


def test_each_replica_runs_its_own_share_of_a_batch():
    """Costs are balanced; samples have their numbers in the data set."""
    lengths = [9, 1, 8, 2, 7, 3]
    plans = [
        BatchPlans(lambda a, b: [0] * a + lengths[: b - a] if a else lengths[a:b], 6, r,
                   BatchSettings(num_replicas=2, order="ascending"))
        for r in range(2)
    ]  # fmt: skip
    shares = [plan.microbatches(0) for plan in plans]
    assert sorted(i for share in shares for each in share for i in each) == list(range(6))
    for plan, share in zip(plans, shares, strict=True):
        assert plan.own_lengths(0) == [[lengths[i] for i in each] for each in share]
        assert plan.own_lengths(0) == sorted(plan.own_lengths(0))
        assert plan.own_sizes(0) == [sum(each) for each in plan.own_lengths(0)]
        assert plan.num_microbatches(0) == 3 and plan.policy(0) is None
    assert shares[0] != shares[1]


def test_tokens_are_counted_over_all_replicas_with_and_without_padding():
    plan = BatchPlans(
        lambda a, b: [3, 5, 2, 6], 4, 1,
        BatchSettings(num_replicas=2, micro_batch_size=2, length_multiple=4),
    )  # fmt: skip
    assert plan.tokens(0) == BatchTokens(16, 2 * 8 + 2 * 8, 9 + 25 + 4 + 36)
    assert plan.tokens(0).padding == 0.5
    twice = plan.tokens(0) + plan.tokens(0)
    assert (twice.real, twice.padded, twice.squares) == (32, 64, 148)
    assert BatchTokens().padding == 1.0


class Planner:
    """Notes what it is asked for, and turns every batch round."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def take(self, key, question):
        (microbatches,) = question.ways.values()
        self.calls.append(("take", key, [list(row.lengths) for row in microbatches]))
        return PlannedOrder(list(range(len(microbatches)))[::-1], "turned", "megatron")

    def ask(self, key, question):
        (microbatches,) = question.ways.values()
        self.calls.append(("ask", key, [list(row.lengths) for row in microbatches]))

    def close(self):
        self.calls.append("close")


def test_the_batch_that_follows_is_asked_for_while_there_is_a_whole_one():
    data = list(range(1, 11))
    planner: Any = Planner()
    plans = BatchPlans(lambda a, b: data[a:b], 4, 0, BatchSettings(order="planned"), planner)
    assert plans.microbatches(0) == [[3], [2], [1], [0]]
    assert planner.calls == [
        ("take", 0, [[1], [2], [3], [4]]), ("ask", 4, [[5], [6], [7], [8]]),
    ]  # fmt: skip
    assert plans.policy(0) == "megatron" and plans.drawn_places(0) == [3, 2, 1, 0]
    assert len(planner.calls) == 2, "a plan is made once"
    planner.calls.clear()
    assert plans.own_lengths(4) == [[8], [7], [6], [5]]
    assert planner.calls == [("take", 4, [[5], [6], [7], [8]])], "two samples fill no batch"
    plans.close()
    assert planner.calls[-1] == "close"


@given(
    st.lists(st.integers(1, 20), min_size=8, max_size=24),
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=40)
def test_even_packing_makes_four_microbatches_for_each_rank_where_it_can(
    lengths, num_replicas, multiple, num_ranks
):
    step, budget = num_replicas * multiple, 20
    plan = BatchSettings(
        num_replicas=num_replicas, multiple=multiple, num_ranks=num_ranks, packing="even",
        budget=budget, costs=LengthCosts.transformer(64),
    )  # fmt: skip
    try:
        found = [each for mine in share_batch(lengths, plan) for each in mine]
    except ConfigError:
        assert len(lengths) % step or len(lengths) < step
        return
    assert sorted(i for each in found for i in each) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in each) <= budget for each in found)
    assert len(found) % step == 0
    wanted = max(-(-sum(lengths) // budget), 4 * num_ranks * num_replicas)
    assert len(found) >= min(wanted, len(lengths) // step * step)


def test_as_few_microbatches_as_the_tokens_allow_are_tried_first(monkeypatch):
    tried = []
    real = __import__("megatron.dpp.sim.batches", fromlist=["pack"]).pack

    def pack(*given, **more):
        tried.append(more["num_bins"])
        return real(*given, **more)

    monkeypatch.setattr("megatron.dpp.sim.batches.pack", pack)
    share_batch([10] * 12, BatchSettings(packing="even", budget=20))
    assert tried == [6], "120 tokens fill six of 20"
    tried.clear()
    share_batch([10] * 12, BatchSettings(packing="even", budget=1000, multiple=3))
    assert tried == [6], "four for the rank, and a multiple of three"


def test_the_largest_microbatch_is_cut_in_half():
    for step, bins in ((3, [[0], [1], [2, 3, 4, 5]]), (4, [[0], [1], [2, 3], [4, 5]])):
        settings = BatchSettings(multiple=step, packing="in-order", budget=12)
        (found,) = share_batch([6, 6, 1, 1, 1, 8], settings)
        assert sorted(found) == bins
    with pytest.raises(ConfigError, match=r"no multiple of 2 microbatches; change global_batch"):
        share_batch([9, 9, 9], BatchSettings(num_replicas=2, packing="in-order", budget=12))
    with pytest.raises(ConfigError, match=r"packing='ffd' needs at least 4 sequences"):
        share_batch([1, 1, 1], BatchSettings(num_replicas=2, multiple=2, packing="ffd", budget=12))
