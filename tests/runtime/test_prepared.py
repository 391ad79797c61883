"""Preparation of a model for its steps: what cannot be trained by tasks, graphs, measurements.

test_lifetimes.py prepares real models, one after the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime import prepared
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.dynamic import full_line
from megatron.dpp.runtime.prepared import Prepared, why_no_graphs
from megatron.dpp.schedule import LastRank, Memory


class Weights:
    """Weight gradients of two layers of each chunk."""

    def __init__(self, chunks: Sequence[Any], say: Any) -> None:
        self.num_pieces = (2,) * len(chunks)

    def inspect(self) -> None:
        """A host may have changed the model."""


class Graphs:
    """Graphs that note what they are made with; a model that has ``changed`` needs others."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.pay, self.more = given[3], more
        self.awaits_size, self.changed, self.closed = False, False, 0
        self.sizes: list[float] = []
        self.slot_bytes, self.keep_size = (lambda eager: 0.0), self.sizes.append

    def inspect(self) -> bool:
        return not self.changed

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "WeightGradients", Weights)
    monkeypatch.setattr(prepared, "ChunkGraphs", Graphs)


class Rank:
    """A rank of a stage whose values are twice or, in words, as large as its own."""

    def __init__(self, chunks: int = 1, capture: Any = "a test's", **config: Any) -> None:
        self.said: list[str] = []
        self.decisions = Decisions(DppConfig(**config), self.said.append)
        self.launching, self.factor = 0.9, 1.0
        session: Any = SimpleNamespace(
            decisions=self.decisions,
            is_open=True,
            largest=lambda call, *values: [self.factor * value for value in values],
            timer=SimpleNamespace(launch_share=lambda chunks: self.launching),
        )
        log = self.said.append
        self.own = Prepared(DppConfig(**config), session, log, log, capture)
        self.call: Any = SimpleNamespace(
            model=[torch.nn.Linear(2, 2) for _ in range(chunks)], length=8,
            config=SimpleNamespace(recompute_granularity=None), padded_rows=lambda config: None,
            captured_rows=lambda config: [3], boundaries=lambda length: Boundaries(8, (8,), (8,)),
        )  # fmt: skip

    def graphs(self) -> Any:
        self.own.prepare(self.call)
        return self.own.graphs


def test_a_trained_parameter_of_two_chunks_is_refused() -> None:
    """Their backwards have no fixed order, in which its gradients would be added."""
    rank = Rank(2)
    one, other = rank.call.model
    other.bias = one.bias
    with pytest.raises(ConfigError, match=r"chunks 0 and 1 of a rank share .*bias and bias"):
        rank.graphs()
    one.bias.requires_grad_(False)
    rank.graphs()


def test_a_model_is_prepared_anew_where_it_or_what_is_trained_of_it_changes() -> None:
    rank = Rank(2)
    rank.decisions.measured(Memory(activation_bytes=1, deferred_bytes=0))
    first, found = rank.graphs(), [rank.own.prepare(rank.call)]
    for frozen in (False, True, True, False):
        rank.call.model[1].weight.requires_grad_(not frozen)
        found.append(rank.own.prepare(rank.call))
    assert [one is other for one, other in itertools.pairwise(found)] == [
        True, False, True, False,
    ]  # fmt: skip
    assert first.closed == 1 and rank.decisions.wants_measuring
    changed = rank.graphs()
    changed.changed = True
    assert rank.graphs() is not changed and changed.closed == 1


@pytest.mark.parametrize(
    ("wanted", "capture", "captured"),
    [("auto", 1, True), ("on", 1, True), ("off", 1, False), ("auto", None, False)],
)
def test_graphs_are_made_where_they_can_be_captured(
    wanted: str, capture: Any, captured: bool
) -> None:
    rank = Rank(capture=capture, cuda_graphs=wanted)
    assert (rank.graphs() is not None) is captured
    if captured:
        rank.decisions.cap = 2.5
        assert rank.graphs().more["rows"] == [3] and rank.graphs().more["most"]() == 2.5


@pytest.mark.parametrize(
    ("word", "given", "said"),
    [
        ("auto", {}, None),
        ("auto", {"launch_share": 0.33}, "33%"),
        ("auto", {"recomputes_all": True}, "recompute_granularity"),
        ("auto", {"filled": 0.8}, None),
        ("auto", {"filled": 1.3}, "1.3 times the memory"),
        ("on", {"launch_share": 0.1, "recomputes_all": True, "filled": 1.3}, None),
    ],
)
def test_graphs_are_taken_where_they_pay(
    word: str, given: dict[str, Any], said: str | None
) -> None:
    reason = why_no_graphs(word, **{"launch_share": 0.9} | given)
    assert reason is None if said is None else said in str(reason)


def test_graphs_are_judged_by_the_largest_values_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pools may take twice what activations do, and half as much again with several lengths."""
    rank = Rank()
    graphs, decisions = rank.graphs(), rank.decisions
    rank.launching, rank.factor = 0.3, 3.0
    assert graphs.pay([0])
    decisions.measured(Memory(activation_bytes=100, deferred_bytes=0))
    decisions.cap = rank.factor = 1.0
    for share, room, held, lengths, wanted in (
        (0.9, 1000, 4.0, 1, True), (0.3, 1000, 4.0, 1, False), (0.9, 1000, 6.0, 1, False),
        (0.9, 1000, 4.0, 2, False), (0.9, 0, 4.0, 1, False), (0.9, None, 6.0, 1, True),
    ):  # fmt: skip
        monkeypatch.setattr(prepared, "room", lambda room=room: room)
        rank.launching, decisions.peak_held = share, held
        rank.call.captured_rows = lambda config, number=lengths: [128] * number
        assert graphs.pay([0]) is wanted, (share, room, held, lengths)
        assert wanted or "CUDA graphs: not used" in rank.said[-1]
    rank.call.config.recompute_granularity = "full"
    assert not graphs.pay([0])


@pytest.mark.parametrize(("split", "last"), [(False, True), (True, False), (True, True)])
def test_measured_memory_is_the_largest_of_the_stage_and_later_that_of_slots(
    monkeypatch: pytest.MonkeyPatch, split: bool, last: bool
) -> None:
    """The head is told apart on the last rank, with weight gradients alone."""
    rank, taken = Rank(2, split_backward="on" if split else "off"), list[Any]()
    graphs, rank.factor = rank.graphs(), 2.0
    monkeypatch.setattr(rank.decisions, "measured", taken.append)
    monkeypatch.setattr(rank.decisions, "measured_slots", taken.append)
    stage: Any = SimpleNamespace(
        activation_bytes={0: 100, 1: 400}, deferred_bytes={0: 30, 1: 50},
        runs_head_in_forward=False, is_last=lambda chunk: last and chunk == 1,
    )  # fmt: skip
    rank.own.account(rank.call, 1.5, stage)
    apart = LastRank.of([100, 400], (2, 2)) if split and last else LastRank(400)
    memory = Memory(
        activation_bytes=3 * apart.activation_bytes, deferred_bytes=150,
        head_room=2 * apart.head_room, last_layers=2 * apart.layers,
    )  # fmt: skip
    assert taken == [memory]
    graphs.awaits_size = True
    rank.own.account(rank.call, 1.5, None)
    assert not graphs.sizes, "no graph has been captured yet"
    graphs.slot_bytes = lambda eager: eager + 10
    for awaits in (True, False):
        graphs.awaits_size = awaits
        rank.own.account(rank.call, 1.5, None)
    assert graphs.sizes == taken[1:] == [20]


def test_a_full_device_is_told_with_what_takes_less_memory() -> None:
    assert full_line(0, 4) is None
    assert re.search(r"again 3 times in 4 steps.*activation.cap.*static", full_line(3, 4) or "")
