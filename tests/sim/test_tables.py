"""Makespan ratios of docs/benchmarks/simulator.md: means over p = 4, 8, 16 and m = 2p, 4p, 8p.

The uniform columns are held to 0.1 %; they draw nothing.
"""

import statistics

import pytest

from megatron.dpp.sim.conditions import condition_costs, uniform
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.schedules import ScheduleConfig

SHAPES = [(p, k * p) for p in (4, 8, 16) for k in (2, 4, 8)]
PLANS = {
    "megatron": ScheduleConfig(policy="megatron", cap="megatron", split_backward=False),
    "earlier": ScheduleConfig(policy="depth-first", cap="none", split_backward=False),
    "fused": ScheduleConfig(cap="megatron", split_backward=False),
    "strict": ScheduleConfig(cap="strict", beta=0.5),
    "I0": ScheduleConfig(cap="megatron", beta=0.5),
}


def mean_ratio(plan, v):
    shapes = [Shape(p, v, m) for p, m in SHAPES]
    return statistics.fmean(plan.run(shape, uniform(shape)).ratio for shape in shapes)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("megatron", 1.126), ("earlier", 1.195), ("fused", 1.126), ("strict", 1.070), ("I0", 1.042)],
)
def test_two_chunks_uniform(name, ratio):
    assert mean_ratio(PLANS[name], 2) == pytest.approx(ratio, abs=0.0011)


@pytest.mark.parametrize(("v", "fused", "split"), [(1, 1.256, 1.084), (4, 1.064, 1.023)])
def test_one_and_four_chunks_uniform(v, fused, split):
    """Ratios with one and four chunks and uniform tasks."""
    cap = "1.5p" if v == 1 else "megatron"
    megatron = mean_ratio(PLANS["megatron"], v)
    assert megatron == pytest.approx(fused, abs=0.0011)
    assert mean_ratio(ScheduleConfig(cap=cap, beta=0.5), v) == pytest.approx(split, abs=0.0011)


def test_never_slower_than_megatron_at_equal_memory():
    for p, v in ((4, 1), (4, 2), (8, 2), (4, 4)):
        for condition in ("unif", "jit.3", "str1.5", "trN", "lnk2", "head", "len"):
            shape = Shape(p, v, 4 * p)
            costs = condition_costs(condition, shape, 0)
            ours = ScheduleConfig(cap="megatron", beta=0.5).run(shape, costs).makespan
            assert ours <= 1.003 * PLANS["megatron"].run(shape, costs).makespan, (p, v, condition)


def test_large_shapes_take_seconds():
    """p = 64 at m = 512 has 196608 tasks."""
    shape = Shape(64, 2, 128)
    result = ScheduleConfig(beta=0.5).run(shape, condition_costs("trN", shape, 0))
    assert result.ratio < 1.25
