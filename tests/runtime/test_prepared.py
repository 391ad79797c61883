"""Preparation of a model for its steps: weight gradients, graphs and measurements.

Models and stages are stand-ins that note what they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime import prepared
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.prepared import Prepared
from megatron.dpp.schedule import LastRank, Memory
from tests.runtime.test_dynamic import Weights, call_of


def sessions_of(current: Any = None) -> Any:
    return SimpleNamespace(current=current)


def prepared_of(
    session: Any = None, said: list[str] | None = None, capture: Any = None, **config: Any
) -> Prepared:
    """Prepares models while ``session`` is open."""
    log = ([] if said is None else said).append
    return Prepared(DppConfig(**config), sessions_of(session), log, log, capture)


def session_of(**config: Any) -> Any:
    """A session that has decisions, and is the largest of its stage."""
    decisions = Decisions(DppConfig(**config), lambda line: None)
    return SimpleNamespace(
        decisions=decisions, largest=lambda call, *values: list(values),
        timer=SimpleNamespace(launch_share=lambda chunks: 0.9),
    )  # fmt: skip


# Models -------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The weight gradients that were made."""
    found: list[Weights] = []

    def make(chunks: Sequence[Any], say: Callable[[str], None]) -> Weights:
        found.append(Weights(chunks))
        return found[-1]

    monkeypatch.setattr(prepared, "WeightGradients", make)
    return found


def test_a_model_whose_weights_are_frozen_between_steps_is_prepared_anew(
    made: list[Weights],
) -> None:
    own = prepared_of()
    call = call_of(2, model=[torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    for frozen, times in ((False, 1), (False, 1), (True, 2), (True, 2), (False, 3)):
        call.model[1].weight.requires_grad_(not frozen)
        own.prepare(call)
        assert len(made) == times


def test_a_model_is_prepared_once_and_another_one_anew(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights]
) -> None:
    said, session, closed = list[str](), session_of(), list[str]()
    graphs = SimpleNamespace(inspect=lambda: True, close=lambda: closed.append("graphs"))
    monkeypatch.setattr(prepared, "ChunkGraphs", lambda *_, **__: graphs)
    own = prepared_of(session, said, capture=object())
    session.decisions.measured(Memory(activation_bytes=1, deferred_bytes=0))
    first, second = call_of(2), call_of(2)
    assert own.prepare(first) is own.prepare(first) is made[0]
    assert len(made) == 1 and made[0].inspections == 1, "a host may have changed it since"
    assert len(said) == 1 and "the backward of chunks [1] is fused" in said[0]
    assert not session.decisions.wants_measuring, "the first model is the one that was measured"
    assert own.prepare(second) is made[1] and len(made) == 2
    assert session.decisions.wants_measuring and closed == ["graphs"]
    second.model[0] = call_of(2).model[0]
    own.prepare(second)
    assert len(made) == 3, "the host wraps it in its own list"


def test_a_model_without_anything_to_defer_has_a_fused_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared, "WeightGradients", lambda chunks, say: Weights(chunks, (0, 0)))
    assert prepared_of().prepare(call_of(2)) is None


def test_graphs_of_a_changed_model_are_made_anew(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights]
) -> None:
    told: list[str] = []

    def graphs(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(inspect=lambda: len(told) > 0, close=lambda: told.append("closed"))

    monkeypatch.setattr(prepared, "ChunkGraphs", graphs)
    own, call, found = prepared_of(capture=object()), call_of(), []
    for _ in range(3):
        own.prepare(call)
        found.append(own.graphs)
    assert told == ["closed"] and found[0] is not found[1] is found[2]


def test_a_trained_parameter_of_two_chunks_is_refused(made: list[Weights]) -> None:
    """Their backwards have no fixed order, in which its gradients would be added."""
    own = prepared_of()
    call = call_of(2)
    call.model = [torch.nn.Linear(2, 2) for _ in range(2)]
    call.model[1].bias = call.model[0].bias
    with pytest.raises(ConfigError, match=r"chunks 0 and 1 of a rank share .*bias and bias"):
        own.prepare(call)
    call.model[0].bias.requires_grad_(False)
    own.prepare(call)


# Graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "capture", "captured"),
    [("auto", 1, True), ("on", 1, True), ("off", 1, False), ("auto", None, False)],
)
def test_graphs_are_made_where_they_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights], wanted: str, capture: Any, captured: bool
) -> None:
    monkeypatch.setattr(prepared, "ChunkGraphs", lambda *_, **__: "graphs")
    own = prepared_of(capture=capture, cuda_graphs=wanted)
    own.prepare(call_of())
    assert own.graphs == ("graphs" if captured else None)


class MadeGraphs:
    """Prepares a model with graphs that note what they are made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, session: Any, call: Any) -> None:
        self.given: tuple[Any, ...] = ()
        self.more: dict[str, Any] = {}
        self.said: list[str] = []
        monkeypatch.setattr(prepared, "ChunkGraphs", self._make)
        self.own = prepared_of(session, self.said, capture=object())
        self.own.prepare(call)

    def _make(self, *given: Any, **more: Any) -> Any:
        self.given, self.more = given, more
        return SimpleNamespace(close=lambda: None)

    def pay(self) -> bool:
        found: bool = self.given[3]([0])
        return found


def test_graphs_have_as_many_slots_as_the_cap_allows(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights]
) -> None:
    call, session = call_of(captured_rows=lambda settings: [3]), session_of()
    graphs = MadeGraphs(monkeypatch, session, call)
    assert graphs.more["rows"] == [3]
    session.decisions.cap = 2.5
    assert graphs.more["most"]() == 2.5


def test_graphs_are_judged_by_the_largest_values_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights]
) -> None:
    call, session = call_of(), session_of()
    shares: list[float] = []

    def largest(call: Any, share: float, filled: float) -> list[float]:
        shares.append(filled)
        return [9 * share, filled]

    session.largest, decisions = largest, session.decisions
    session.timer.launch_share = lambda chunks: 0.1
    graphs = MadeGraphs(monkeypatch, session, call)
    graphs.said.clear()
    monkeypatch.setattr(prepared, "room", lambda: 1000)
    assert graphs.pay() is True and not graphs.said
    decisions.measured(Memory(activation_bytes=100, deferred_bytes=0))
    decisions.peak_held = 4.0
    decisions.cap = 6.0
    assert graphs.pay() is True
    assert "may reserve up to 0.0 GiB for 6 chunk activations" in graphs.said.pop()
    assert shares[-1] == pytest.approx(2.0 * 4.0 * 100 / 1000)
    call.captured_rows = lambda settings: [128, 256]
    assert graphs.pay() is False, "slots of several lengths have room for half as much again"
    assert shares[-1] == pytest.approx(3.0 * 4.0 * 100 / 1000)
    graphs.said.clear()
    call.captured_rows = lambda settings: []
    decisions.peak_held = 6.0
    assert graphs.pay() is False
    assert "CUDA graphs: not used, as they may need 1.2 times the memory" in graphs.said[0]
    decisions.peak_held = 4.0
    call.config.recompute_granularity = "selective"
    assert graphs.pay() is True and graphs.said.pop()
    call.config.recompute_granularity = "full"
    assert graphs.pay() is False and "recompute_granularity" in graphs.said[1]
    monkeypatch.setattr(prepared, "room", lambda: 0)
    graphs.pay()
    assert shares[-1] > 1.0, "nothing is left"
    monkeypatch.setattr(prepared, "room", lambda: None)
    graphs.pay()
    assert shares[-1] == 0.0, "the room is not known"


def test_boundaries_of_several_tensors_have_no_graphs(made: list[Weights]) -> None:
    said: list[str] = []
    call = call_of(boundaries=lambda length: Boundaries(8, (8,), (4, 4)))
    own = prepared_of(said=said, capture=object())
    own.prepare(call)
    assert own.graphs is None
    assert "several tensors (1 received, 2 sent)" in said[-1]


# Memory -------------------------------------------------------------------------------------------


def measured_stage(sizes: Sequence[int], *, last: bool) -> Any:
    return SimpleNamespace(
        activation_bytes=dict(enumerate(sizes)), deferred_bytes={0: 30, 1: 50},
        runs_head_in_forward=False,
        is_last=lambda chunk: last and chunk == len(sizes) - 1,
    )  # fmt: skip


@pytest.mark.parametrize(("split", "last"), [(False, True), (True, False), (True, True)])
def test_the_head_is_told_apart_on_the_last_rank_with_weight_gradients_alone(
    monkeypatch: pytest.MonkeyPatch, split: bool, last: bool
) -> None:
    monkeypatch.setattr(prepared, "WeightGradients", lambda chunks, say: Weights(chunks, (2, 2)))
    session, sizes, asked = session_of(), [100, 400], list[tuple[float, ...]]()
    session.largest = lambda call, *values: asked.append(values) or list(values)
    own = prepared_of(session, split_backward="on" if split else "off")
    call = call_of(2)
    own.prepare(call)
    own.account(call, 1.0, measured_stage(sizes, last=last))
    expected = LastRank.of(sizes, (2, 2)) if split and last else LastRank(400)
    activation, _, *rest = asked[0]
    assert LastRank(activation, head_room=rest[0], layers=rest[1]) == expected
    assert (expected == LastRank(400)) is not (split and last)


def test_measured_memory_is_the_largest_of_the_stage_and_later_that_of_slots(
    monkeypatch: pytest.MonkeyPatch, made: list[Weights]
) -> None:
    taken, asked, kept = list[Any](), list[tuple[float, ...]](), list[float]()
    session = SimpleNamespace(
        decisions=SimpleNamespace(
            measured=taken.append, measured_slots=taken.append, activation_bytes=30
        ),
        largest=lambda call, *values: asked.append(values) or [2 * value for value in values],
    )
    graphs: Any = SimpleNamespace(awaits_size=False, keep_size=kept.append)
    monkeypatch.setattr(prepared, "ChunkGraphs", lambda *_, **__: graphs)
    own, call = prepared_of(session, capture=object()), call_of(2)
    own.prepare(call)
    own.account(call, 1.5, measured_stage([100, 80], last=False))
    assert asked == [(150.0, 75.0, 1.0, 1.0)]
    expected = Memory(activation_bytes=300, deferred_bytes=150, head_room=2, last_layers=2)
    assert taken == [expected]
    own.account(call, 1.5, None)
    assert len(taken) == 1, "measured once"
    graphs.awaits_size, graphs.slot_bytes = True, lambda eager: 0
    own.account(call, 1.5, None)
    assert not kept and len(taken) == 1, "no graph has been captured yet"
    graphs.slot_bytes = lambda eager: eager + 10
    own.account(call, 1.5, None)
    assert kept == [80] and taken[1:] == [80]
    graphs.awaits_size = False
    own.account(call, 1.5, None)
    assert kept == [80]
