"""Predictions of a change: each by its own effect, over costs given by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.dpp.report import whatif
from megatron.dpp.report.analysis.summary import PredictedTime
from megatron.dpp.report.analysis.times import UNDISTURBED
from megatron.dpp.report.whatif import (
    Recorded,
    WhatIf,
    effects,
    without_imbalance,
    without_jitter,
    without_link,
)
from megatron.dpp.sim.costs import Shape


def run_of(times: list[float], *, split: bool = True, window: float = 1.0) -> Recorded:
    """One rank whose F, B and W take these times."""
    tasks = np.array([[times], [times], [times if split else [0.0] * len(times)]])
    none = np.zeros((0, 2, len(times)))
    return Recorded(
        Shape(1, 1, len(times)), tasks, np.array([]), none, [[]], [0.0],
        dynamic=True, window=window, tail=0.0,
    )  # fmt: skip


def test_only_tasks_far_above_the_undisturbed_time_are_disturbed() -> None:
    """Those within the spread of the run stay as they are."""
    times = [10.0, 11.0, 12.0, 13.0, 13.9, 40.0]
    run = run_of(times)
    without_jitter([run_of(times)], [0])(run)
    changed = run.tasks[0][0].tolist()
    middle = sorted(times)[int(len(times) * UNDISTURBED)]
    kept = [time for time in times if time <= 2 * middle - 10.0]
    assert len(kept) > int(len(times) * UNDISTURBED) + 1, "more than the middle one"
    assert changed[: len(kept)] == kept
    assert all(time in kept for time in changed[len(kept) :])


@pytest.mark.parametrize(("split", "backward", "weights"), [(True, 7.0, 7.0), (False, 4.0, 0.0)])
def test_a_fused_backward_saves_the_imbalance_of_both_its_parts(
    split: bool, backward: float, weights: float
) -> None:
    run = run_of([10.0], split=split)
    without_imbalance([3], {(3, 0): 3e9, (2, 0): 9e9})(run)
    assert run.tasks[:, 0].tolist() == [[7.0], [backward], [weights]]


def test_the_last_iterations_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones have initialisation in them."""
    monkeypatch.setattr(Recorded, "replayed", lambda run: run.window)
    runs = [run_of([1.0], window=float(number)) for number in range(8)]
    assert [run.window for run in WhatIf(runs).runs] == [3.0, 4.0, 5.0, 6.0, 7.0]


def test_what_varies_is_removed_before_slowness_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = ["slow-rank", "jitter", "slow-link", "transient", "elsewhere"]

    def removal(culprit: Any, *_: Any) -> Any:
        return None if culprit.kind == "elsewhere" else lambda run: run.append(culprit.kind)

    monkeypatch.setattr(whatif, "removal", removal)
    tried: list[list[str]] = []

    def predict(name: str, change: Any) -> PredictedTime:
        tried.append([])
        change(tried[-1])
        return PredictedTime(name, 10.0, 10.0 - len(tried[-1]))

    model: Any = SimpleNamespace(runs=[], predict=predict)
    culprits: Any = [SimpleNamespace(kind=kind) for kind in kinds]
    assert effects(model, culprits, [0]) == [pytest.approx(0.1)] * 4 + [None]
    assert tried[0] == ["jitter", "transient", "slow-rank", "slow-link"]
    assert tried[1:3] == [["slow-rank"], ["jitter", "transient", "slow-link"]]


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_a_link_is_removed_both_ways_and_between_all_chunks(places: tuple[int, int]) -> None:
    """Of three ranks with two chunks; a culprit may name the link by its way back."""
    hops = np.array([9.0, 1.0, 2.0, 8.0, 3.0])
    run = dataclasses.replace(
        run_of([1.0]),
        shape=Shape(3, 2, 1),
        hops=hops,
        delays=np.tile(hops[:, None, None], (1, 2, 1)),
    )
    without_link(places)(run)
    assert run.hops.tolist() == [2.0, 1.0, 2.0, 2.0, 3.0]
    assert run.delays[:, :, 0].tolist() == [[hop, hop] for hop in run.hops]
