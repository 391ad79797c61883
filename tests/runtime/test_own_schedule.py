"""The choice of megatron-core's own schedule. test_equality.py runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import LAUNCH_BOUND_FROM, DppConfig
from megatron.dpp.runtime.own_schedule import OwnSchedule

ALONE = SimpleNamespace(size=lambda: 1)


def call_of(chunks: int = 2, **more: Any) -> Any:
    """A training step of two pipeline ranks."""
    config = {
        "variable_seq_lengths": False, "delay_wgrad_compute": False,
        "microbatch_group_size_per_vp_stage": None, "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }  # fmt: skip
    config |= {name: more.pop(name) for name in config if name in more}
    groups = SimpleNamespace(tp=ALONE, pp=SimpleNamespace(size=lambda: 2), dp_cp=ALONE)
    usual = {
        "model": [None] * chunks, "config": SimpleNamespace(**config), "pg_collection": groups,
        "num_microbatches": 8, "forward_only": False, "cut": None, "adjust_tensor_shapes_fn": None,
        "boundary_example": lambda: torch.zeros(1),
    }  # fmt: skip
    return SimpleNamespace(**usual | more)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    launching: float = 1.0,
    other: float = 1.0,
    theirs: float = 8.0,
    ranks: int = 2,
    chunks: int = 2,
    **config: Any,
) -> tuple[OwnSchedule, list[str]]:
    """After the choice of a rank beside one whose share of launching is ``other``, with as many
    microbatches as ``theirs``.
    """
    said: list[str] = []
    own = OwnSchedule(DppConfig(**config), said.append)
    others = torch.tensor([other, theirs, -theirs], dtype=torch.float64)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda own, op, group: own.copy_(own.minimum(others))
    )
    session: Any = SimpleNamespace(topology=SimpleNamespace(num_ranks=ranks))
    own.choose(call_of(chunks), session, launching)
    return own, said


def test_equal_lengths_that_launching_limits_on_all_ranks_are_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, said = chosen(monkeypatch, 0.9, 0.8)
    assert own.runs(call_of(), {}) and not own.runs(call_of(forward_only=True), {})
    assert len(said) == 1 and "launching takes 80%" in said[0] and "keeps ours" in said[0]
    for different in (
        {"other": 0.7},
        {"launching": 0.0},
        {"theirs": 6.0},
        {"theirs": 10.0},
        {"ranks": 4},
    ):
        own, said = chosen(monkeypatch, **different)
        assert not own.runs(call_of(), {}) and not said


@pytest.mark.parametrize(
    "asked",
    [
        {"policy": "megatron"}, {"split_backward": "on"}, {"transport": "shm"},
        {"activation_cap": "static"}, {"cuda_graphs": "on"}, {"inject": "jitter:0.3"},
        {"record": "decisions"},
    ],
)  # fmt: skip
def test_what_is_asked_for_stays(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    own, said = chosen(monkeypatch, **asked)
    assert not own.runs(call_of(), {}) and not said


@pytest.mark.parametrize(
    ("call", "runs"),
    [
        ({"chunks": 1, "num_microbatches": 5, "overlap_p2p_comm": False}, True),
        ({"num_microbatches": 5}, False),
        ({"overlap_p2p_comm": False}, False),
        ({"batch_p2p_comm": True}, False),
        ({"microbatch_group_size_per_vp_stage": 4}, False),
        ({"microbatch_group_size_per_vp_stage": 2}, True),
        ({"variable_seq_lengths": True}, False),
        ({"delay_wgrad_compute": True}, False),
        ({"adjust_tensor_shapes_fn": len}, False),
        ({"cut": object()}, False),
        ({"virtual_pipeline_model_parallel_size": None}, False),
        ({"chunks": 1, "virtual_pipeline_model_parallel_size": 2}, False),
        ({"model": ["another", "model"]}, False),
    ],
)
def test_a_step_that_it_cannot_run_as_well_stays_ours(
    monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], runs: bool
) -> None:
    own, _ = chosen(monkeypatch, LAUNCH_BOUND_FROM, chunks=call.get("chunks", 2))
    assert own.runs(call_of(**call), {}) is runs


def test_process_groups_without_a_communicator_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's schedule takes both or neither, so a host's sixth step would have failed."""
    own, _ = chosen(monkeypatch)
    groups, communicator = {"pg_collection": object()}, {"p2p_communicator": object()}
    assert own.runs(call_of(), groups | communicator)
    assert not own.runs(call_of(), groups) and not own.runs(call_of(), communicator)
