"""Costs that plans start from: what is drawn, what bounds a search, and whether graphs pay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.plan import times as plan_times
from megatron.dpp.plan.model_costs import ModelCosts, PartCosts
from megatron.dpp.plan.planner import Planner
from megatron.dpp.plan.shape import LayerLayout
from megatron.dpp.sim.costs import Costs, Hop, Shape

NOTHING = PartCosts((0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("graphs", "chunks", "layer", "head", "replayed"),
    [
        # Four layers, each of which takes 3 to launch; 0.75 of the time is enough.
        ("auto", 1, (2.0, 1.0, 1.0), 0.0, True),
        ("auto", 1, (2.1, 1.0, 1.0), 0.0, False),
        ("auto", 1, (0.5, 2.5, 1.0), 0.0, False),  # 4.5, as a forward is not launched in 0.5
        ("auto", 1, (0.0, 0.0, 0.0), 4.0, True),
        ("auto", 1, (0.0, 0.0, 0.0), 4.1, False),
        ("auto", 2, (0.0, 0.0, 0.0), 4.1, True),  # the other chunk has no head
        ("on", 1, (9.0, 9.0, 9.0), 9.0, True),
        ("off", 1, (0.0, 0.0, 0.0), 0.0, False),
    ],
)
def test_graphs_pay_from_a_share_of_launching(
    monkeypatch: pytest.MonkeyPatch,
    graphs: str,
    chunks: int,
    layer: tuple[float, float, float],
    head: float,
    replayed: bool,
) -> None:
    monkeypatch.setattr(plan_times, "_launches", lambda *_: (1.0, 1.0, 1.0))
    schedule = SimpleNamespace(split_backward=True)
    shape: Any = SimpleNamespace(
        graphs=graphs, num_layers=4, pipeline=1, chunks=chunks, schedule=schedule
    )
    device: Any = None
    assert plan_times._replays(shape, device, layer, (head, 0.0, 0.0)) == replayed


@pytest.mark.parametrize(
    ("layers", "least"),
    [
        # A layer takes 1 + 2 + 3, the head 1.5, and all 10 microbatches count.
        ((1, 4, 2, 3), 1.25 + 10 * (7 * 6 + 1.5)),
        ((4, 1, 3, 2), 10 * 7 * 6),
    ],
)
def test_the_least_time_is_the_busiest_ranks_work_on_all_its_chunks(
    layers: tuple[int, ...], least: float
) -> None:
    """It begins with the forward and the hop of the first chunk before it."""
    parts = ModelCosts(
        10, PartCosts((1.0, 2.0, 3.0)), NOTHING, PartCosts((0.5, 0.5, 0.5)), hop=0.25
    )
    planner = Planner(parts, 2, 10, most_simulated=4)
    assert planner.least_seconds(LayerLayout(2, layers)) == pytest.approx(least)


def drawn(seed: int | None, sigma: float = 0.5) -> Costs:
    """Costs of two stages of 8 layers and three microbatches."""
    parts = ModelCosts(
        16, PartCosts((1.0, 2.0, 3.0)), NOTHING, NOTHING, hop=0.5, sigma=sigma, between=0.25
    )
    return parts.costs(Shape(2, 1, 3), [8, 8], seed)


def test_every_task_draws_a_time_of_its_own_and_a_seed_draws_the_same() -> None:
    factors = {
        round(time / (8 * each), 9)
        for each, rows in zip((1, 2, 3), drawn(0).durations, strict=True)
        for row in rows
        for time in row
    }
    assert len(factors) == 3 * 2 * 3 and 1.0 not in factors
    assert drawn(0) == drawn(0) != drawn(1)


@pytest.mark.parametrize(("seed", "sigma"), [(None, 0.5), (0, 0.0)])
def test_without_a_seed_or_a_spread_nothing_is_drawn(seed: int | None, sigma: float) -> None:
    costs = drawn(seed, sigma)
    assert costs.durations == tuple([[8.0 * each] * 3] * 2 for each in (1, 2, 3))
    assert costs.hops == [Hop(0.25, 0.25)]
    assert costs.overhead == {0: 0.25, 1: 0.25}
