"""Costs that plans start from: what is drawn, what bounds a search, and whether graphs pay."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.config import ENGINE_ROWS
from megatron.dpp.report.recorded import hop_delay, message_delays
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp_train.cost import estimate as plan_estimate
from megatron.dpp_train.cost import times as plan_times
from megatron.dpp_train.cost.from_flags import is_captured
from megatron.dpp_train.cost.model_costs import ModelCosts, PartCosts
from megatron.dpp_train.cost.planner import Planner
from megatron.dpp_train.cost.shape import LayerLayout

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
    assert replays(monkeypatch, layer, head, graphs=graphs, num_layers=4, chunks=chunks) == replayed


def replays(
    monkeypatch: pytest.MonkeyPatch, layer: tuple[float, float, float], head: float, **given: Any
) -> bool:
    """True if layers of these times, whose tasks take 1 each to launch, run as graphs."""
    usual = {
        "pipeline": 1, "tensor": 1, "shard": "none", "recompute": "none", "engine": False,
        "schedule": SimpleNamespace(split_backward=True, dynamic=True),
    }  # fmt: skip
    shape: Any = SimpleNamespace(**usual | given)
    shape.layout = SimpleNamespace(rank_layers=lambda rank: shape.num_layers)
    device: Any = SimpleNamespace(launch=1.0, queues=True, between=0.0)
    whole = plan_times.PartTimes(
        layer=layer, lookup=(0.0,) * 3, head=(head, 0.0, 0.0), between=0.0, replayed=True
    )
    monkeypatch.setattr(plan_times, "device_times", lambda *_: whole)
    monkeypatch.setattr(plan_times.constants, "WEIGHTS_LAUNCH", 1.0)
    return plan_times.part_times(shape, device).replayed


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


def test_slots_are_filled_by_all_microbatches_and_not_only_by_those_that_are_simulated() -> None:
    layer = PartCosts((1.0, 1.0, 1.0), activation_bytes=10.0)
    parts = ModelCosts(2, layer, NOTHING, NOTHING, slot_layers=0.5)
    planner = Planner(parts, 2, 10, most_simulated=1)
    assert planner.predict(LayerLayout(2, (1, 1)), "2p").peak_bytes[0] == 4 * 15.0


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


def test_the_bound_of_a_planned_run_is_that_of_the_best_number_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise layouts that would win with more chunks are left out."""
    parts = ModelCosts(16, PartCosts((1.0, 1.0, 1.0)), NOTHING, NOTHING)
    monkeypatch.setattr(plan_estimate, "model_costs", lambda *_: parts)
    monkeypatch.setattr(plan_estimate, "outside_seconds", lambda *_: 100.0)
    fields = {
        "pipeline": 4, "num_microbatches": 2, "num_layers": 16, "shard": "none",
        "layout": LayerLayout(4, (4, 4, 4, 4)),
    }  # fmt: skip
    shape: Any = dataclasses.make_dataclass("Shape", fields, frozen=True)(**fields)
    device: Any = None
    # The last rank's 2 * 4 * 3, after a first chunk of 4 layers, or of 1, on each of three ranks.
    assert plan_estimate.least_seconds(shape, device) == 100 + 24 + 12
    planned = plan_estimate.least_seconds(shape, device, planned=True)
    planner = Planner(parts, 4, 2)
    bounds = [planner.least_seconds(planner.balanced(chunks)) for chunks in (1, 2, 4)]
    assert planned == 100 + min(bounds) < 100 + bounds[0]


@pytest.mark.parametrize(
    ("there", "back", "seconds"),
    [
        ((100, True), (300, True), 200e-9),
        ((100, False), (300, True), 300e-9),
        ((100, False), (300, False), 100e-9),  # a bound below what is usual
        ((900, False), (800, False), 500e-9),
        (None, None, 500e-9),
    ],
)
def test_a_hop_that_nobody_waited_for_takes_its_bound_or_what_is_usual(
    there: tuple[int, bool] | None, back: tuple[int, bool] | None, seconds: float
) -> None:
    given = {(4, 5): there, (5, 4): back, (5, 6): (500, True), (6, 5): (1, False)}
    links: Any = {
        link: SimpleNamespace(delay=each[0], clean=each[1]) for link, each in given.items() if each
    }
    assert hop_delay(links, [4, 5, 6], 0) == pytest.approx(seconds)


def test_a_message_has_its_own_delay_where_its_receiver_waited() -> None:
    """Between two chunks, from the last rank to the first, and back."""
    to_first = {(1, "forward", 0): 7 * 10**9, (0, "backward", 1): 99 * 10**9}
    to_last = {(0, "backward", 1): 9 * 10**9, (1, "forward", 0): 99 * 10**9}
    links: Any = {
        link: SimpleNamespace(delay=3 * 10**9, clean=True, waited_for=own)
        for link, own in (((5, 4), to_first), ((4, 5), to_last))
    }
    assert message_delays(links, [4, 5], 1, 2) == ([7.0, 3.0], [3.0, 9.0])


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({}, True),
        ({"overlap_param_gather": True}, False),
        ({"deepspeed_zero_stage": 1}, False),
        ({"context_parallel_size": 2}, False),
        ({"num_experts": 4}, False),
        ({"dpp_slice_tokens": "auto"}, False),
        ({"tensor_model_parallel_size": 2}, True),
        ({"transformer_impl": "transformer_engine"}, True),
        ({"fp8": "hybrid"}, False),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, True),
        ({"transformer_impl": "transformer_engine", "tensor_model_parallel_size": 2}, False),
        ({"transformer_impl": "transformer_engine", "seq_length": ENGINE_ROWS + 1}, False),
    ],
)
def test_an_estimate_knows_the_runs_whose_chunks_cannot_be_captured(
    changes: dict[str, Any], captured: bool
) -> None:
    args: Any = {
        "transformer_impl": "local", "overlap_param_gather": False, "deepspeed_zero_stage": 0,
        "context_parallel_size": 1, "num_experts": None, "tensor_model_parallel_size": 1,
        "seq_length": ENGINE_ROWS, "dpp_slice_tokens": "off", "fp8": None,
        "fp8_recipe": "delayed", "fp8_param_gather": False,
    }  # fmt: skip
    assert is_captured(argparse.Namespace(**args | changes)) == captured
