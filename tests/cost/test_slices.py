"""Estimates of runs whose sequences are cut into slices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.dpp_train.cost.estimate import (
    estimate,
    first_peak_bytes,
    fitting,
    least_seconds,
    traffic,
)
from megatron.dpp_train.cost.memory import key_bytes, least_bytes, rank_memory, stage_bytes
from megatron.dpp_train.cost.shape import RunSchedule
from megatron.dpp_train.cost.text import lines
from megatron.dpp_train.cost.times import model_costs
from tests.cost.test_memory import H200, plain_device, shape


def runs(**more: Any) -> tuple[Any, Any]:
    """A run of sequences of 1,024 tokens in 8 slices, and the same run uncut."""
    model = {"seq_length": 1024}
    schedule = RunSchedule(dynamic=True, head_in_forward=True, slice_tokens="128")
    cut = shape((2, 2), model, pipeline=2, num_microbatches=4, schedule=schedule, **more)
    off = dataclasses.replace(schedule, slice_tokens="off")
    return cut, dataclasses.replace(cut, schedule=off)


def test_the_work_of_all_slices_is_that_of_the_sequence() -> None:
    cut, whole = (model_costs(each, plain_device()) for each in runs())
    assert cut.slices is not None and whole.slices is None and len(cut.slices.tokens) == 8
    for one, other in ((cut.layer, whole.layer), (cut.head, whole.head)):
        assert [8 * seconds for seconds in one.times] == pytest.approx(other.times)
    forwards = [each[0] for each in cut.slices.more]
    assert sorted(forwards) == forwards and sum(forwards) == pytest.approx(0, abs=1e-15)
    assert forwards[-1] > 0 == cut.slices.more[-1][2], "W reads no keys"


def test_slices_keep_less_and_wait_less() -> None:
    found, whole = (estimate(each, H200) for each in runs())
    cut = found.shape
    slices, keys = cut.slices, sum(key_bytes(cut.slices[0]))
    for rank, memory in enumerate(found.ranks):
        assert 0 < memory.activations <= (8 + 2 - rank) * stage_bytes(slices[0], rank)
        assert 2 * keys <= memory.keys <= 2 * 2 * keys, "of one or two sequences in two layers"
    assert found.bubble < whole.bubble
    assert found.peak_bytes < whole.peak_bytes
    assert least_bytes(cut) <= found.peak_bytes
    for each in (found, whole):
        assert least_seconds(each.shape, H200) <= each.seconds
    assert traffic(cut).pipeline == traffic(whole.shape).pipeline == 8 * 8 * traffic(cut).hop


def test_logits_and_temporaries_are_those_of_a_slice() -> None:
    cut, whole = runs(recompute="full")
    for rank in range(2):
        one, other = (rank_memory(each, rank, 0.0).workspace for each in (cut, whole))
        assert one < other / 4
    assert rank_memory(cut, 0, 3.0, 4.0).total == rank_memory(cut, 0, 7.0).total


def test_short_sequences_and_static_schedules_have_no_slices() -> None:
    cut, whole = runs()
    for schedule in (
        dataclasses.replace(cut.schedule, slice_tokens="768"),
        dataclasses.replace(cut.schedule, slice_tokens="auto"),
        dataclasses.replace(cut.schedule, dynamic=False),
    ):
        assert len(dataclasses.replace(cut, schedule=schedule).slices) == 1
    assert whole.slices == [whole]


def test_a_cap_in_bytes_bounds_activations_and_keys_of_slices() -> None:
    cut, _ = runs()
    free = max(one.activations + one.keys for one in estimate(cut, H200).ranks)
    most = 1.2 * free
    schedule = dataclasses.replace(
        cut.schedule, policy="dynamic", split_backward=True, cap=f"{most / 2**10:.0f}KiB"
    )
    bounded = estimate(dataclasses.replace(cut, schedule=schedule), H200)
    held = max(one.activations + one.keys for one in bounded.ranks)
    assert 0.5 * most < held <= 1.05 * most


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_the_first_microbatches_of_a_run_hold_no_more_than_all(
    p: int, v: int, recompute: str
) -> None:
    """So ``train --mode auto`` leaves out what they do not fit."""
    for tokens, number in (("128", 8), ("256", 24)):
        schedule = RunSchedule(
            dynamic=True, policy="auto", cap="auto", split_backward=True, slice_tokens=tokens,
            head_in_forward=True,
        )  # fmt: skip
        layers, model = (2,) * (p * v), {"seq_length": 1024}
        run = shape(
            layers, model, pipeline=p, num_microbatches=number, recompute=recompute,
            schedule=schedule,
        )  # fmt: skip
        first, whole = first_peak_bytes(run, H200), estimate(run, H200).peak_bytes
        assert least_bytes(run) <= first <= whole
        few = dataclasses.replace(run, num_microbatches=p + 1)
        assert first == estimate(few, H200).peak_bytes


def test_auto_cuts_what_would_not_fit_whole() -> None:
    """Many long sequences run whole where memory holds them; else their logits and activations are
    those of slices."""
    auto = RunSchedule(
        dynamic=True, policy="auto", cap="auto", split_backward=True, slice_tokens="auto",
        head_when_cut=True,
    )  # fmt: skip
    model = {"seq_length": 16384}
    run = shape((2, 2), model, pipeline=2, num_microbatches=64, schedule=auto)
    whole = estimate(run, H200)
    assert len(whole.shape.slices) == 1 and not whole.shape.schedule.head_in_forward
    (line,) = (line for line in lines(whole) if line.startswith("slices"))
    assert line == f"slices        auto takes {run.weighed.text}"
    small = dataclasses.replace(H200, memory_bytes=0.9 * whole.peak_bytes)
    cut = estimate(run, small)
    assert len(cut.shape.slices) > 1 and cut.shape.schedule.head_in_forward
    assert cut.peak_bytes < whole.peak_bytes
    assert fitting(cut.shape, small) is cut.shape and fitting(run, H200) is run
