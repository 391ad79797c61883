"""Replicas, microbatches and their order for sequences of unlike length."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts
from megatron.dpp.sim.packing import PACKINGS, balance, orders, pack
from megatron.dpp.sim.schedules import ScheduleConfig

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(lengths, st.integers(1, 9))
def test_balance_shares_all_in_even_counts(costs, num_replicas):
    if num_replicas > len(costs):
        with pytest.raises(ConfigError, match="cannot be shared by"):
            balance(costs, num_replicas)
        return
    shares = balance(costs, num_replicas)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(share == sorted(share) for share in shares)


def test_balance_evens_out_what_round_robin_does_not():
    rng = random.Random(1)
    costs = [MIXES["sft"].draw(rng) for _ in range(16 * 64)]
    loads = [sum(costs[i] for i in share) for share in balance(costs, 16)]
    robin = [sum(costs[r::16]) for r in range(16)]
    mean = sum(costs) / 16
    assert max(loads) / mean < 1.001 < 1.1 < max(robin) / mean


@given(lengths, st.sampled_from(PACKINGS), st.integers(100, 300), st.integers(1, 60))
def test_a_packing_holds_every_sequence_once_within_the_budget(drawn, how, budget, num_bins):
    try:
        bins = pack(drawn, budget, how, num_bins=num_bins)
    except ConfigError:
        assert how == "even"
        assert num_bins > len(drawn) or sum(drawn) > (budget - 100) * num_bins
        return
    assert sorted(index for one in bins for index in one) == list(range(len(drawn)))
    assert all(one and sum(drawn[i] for i in one) <= budget for one in bins)
    if how == "none":
        assert len(bins) == len(drawn)
    if how == "in-order":
        assert [i for one in bins for i in one] == list(range(len(drawn)))
    if how in ("in-order", "ffd"):
        assert len(bins) <= 2 * sum(drawn) / budget + 1
    if how == "even":
        assert len(bins) == num_bins


def test_even_packing_evens_out_the_costs_and_then_the_numbers():
    assert pack([1] * 4, 9, "even", costs=[9, 3, 3, 3], num_bins=2) == [[0], [1, 2, 3]]
    assert pack([1] * 4, 9, "even", costs=[2, 2, 0, 0], num_bins=2) == [[0, 2], [1, 3]]
    assert pack([3, 3, 1], 4, "even", costs=[9, 9, 1], num_bins=2) == [[0, 2], [1]]


def test_in_order_a_microbatch_closes_when_the_next_sequence_does_not_fit():
    assert pack([3, 3, 2, 4, 6, 1], 6, "in-order") == [[0, 1], [2, 3], [4], [5]]
    assert pack([2, 3, 4, 3], 6, "ffd") == [[2, 0], [1, 3]], "the longest first, where it fits"


def test_balance_gives_the_costliest_to_the_least_loaded_replica_with_room():
    assert balance([5, 1, 4, 4, 1, 1], 2) == [[0, 1, 5], [2, 3, 4]] or balance(
        [5, 1, 4, 4, 1, 1], 2
    ) == [[0, 1, 4], [2, 3, 5]]
    assert sorted(map(len, balance([9] * 7, 3))) == [2, 2, 3]


def test_packings_that_cannot_be():
    with pytest.raises(ConfigError, match="a sequence of 9 tokens exceeds the budget of 8"):
        pack([9], 8, "ffd")
    with pytest.raises(ConfigError, match="expected one of none, in-order"):
        pack([1], 8, "tight")
    with pytest.raises(ConfigError, match="2 microbatches of 8 tokens do not hold 24 tokens"):
        pack([8, 8, 8], 8, "even", num_bins=2)


@given(lengths, st.integers(1, 4))
def test_orders_are_permutations(costs, num_ranks):
    found = orders(costs, num_ranks)
    assert all(sorted(order) == list(range(len(costs))) for order in found.values())
    sizes = [costs[i] for i in found["small-big-small"]]
    top = sizes.index(max(sizes))
    assert sizes[:top] == sorted(sizes[:top])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)


@pytest.mark.parametrize("policy", ["dynamic", "megatron"])
def test_the_best_order_is_better_than_the_drawn_one(policy):
    rng = random.Random(3)
    drawn = [MIXES["sft"].draw(rng) for _ in range(24)]
    config = ScheduleConfig(policy=policy)

    def simulated(order):
        tokens = [drawn[i] for i in order]
        costs = LengthCosts.transformer().of([[n] for n in tokens], num_ranks=4, num_chunks=2)
        return config.run(Shape(4, 2, 24, tuple(tokens)), costs).makespan

    assert min(map(simulated, orders(drawn, 4).values())) < simulated(list(range(24)))
