"""The dynamic schedule around its tasks: models, graphs, measurements and evaluations.

Links, models and stages are stand-ins that note what they are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries, Tokens
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime import dynamic
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.dynamic import DppSchedule
from megatron.dpp.runtime.stage_group import StageGroup
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, LastRank, Memory


def call_of(chunks: int = 1, **given: Any) -> Any:
    """A call as the schedule reads it."""
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=None, recompute_granularity=None,
    )  # fmt: skip
    usual: dict[str, Any] = {
        "config": config, "model": [torch.nn.Identity() for _ in range(chunks)],
        "num_microbatches": 4, "forward_only": False, "length": 8, "pg_collection": None,
        "forward_step_func": "the user's", "longest": lambda most: max(8, most),
        "boundaries": lambda length: Boundaries(length, (length,), (length,)),
        "boundary_example": lambda *_: torch.zeros(3),
        "tokens": lambda longest, _: Tokens(longest, 4),
    }  # fmt: skip
    return SimpleNamespace(**usual | given)


def schedule_of(said: list[str] | None = None, **config: Any) -> DppSchedule:
    return DppSchedule(DppConfig(**config), seed=1, log=([] if said is None else said).append)


class Weights:
    """Weight gradients of chunks whose names are their numbers of pieces."""

    def __init__(self, chunks: Sequence[Any], pieces: Sequence[int] = (2, 0)) -> None:
        self.num_pieces = tuple(pieces[: len(chunks)])
        self.bindings = self.inspections = 0

    def inspect(self) -> None:
        self.inspections += 1

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        self.bindings += 1
        yield


def test_own_work_is_a_steps_forwards_backwards_and_every_piece_of_its_weight_gradients() -> None:
    own: Any = schedule_of()
    assert own.own_work_seconds(4) == 0.0, "nothing has run"
    durations = {("F", 0): 1.0, ("B", 0): 2.0, ("W", 0): 0.25, ("F", 1): 3.0, ("B", 1): 6.0}
    own._session = SimpleNamespace(timer=SimpleNamespace(durations=durations))
    assert own.own_work_seconds(4) == 4 * 12.0
    own._weight_gradients = Weights([0, 1])
    assert own.own_work_seconds(4) == 4 * (12.0 + 2 * 0.25), "a chunk without pieces adds nothing"


# Models -------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The weight gradients that were made."""
    made: list[Weights] = []

    def make(chunks: Sequence[Any], say: Callable[[str], None]) -> Weights:
        made.append(Weights(chunks))
        return made[-1]

    monkeypatch.setattr(dynamic, "WeightGradients", make)
    return made


def test_a_model_whose_weights_are_frozen_between_steps_is_prepared_anew(
    prepared: list[Weights],
) -> None:
    own: Any = schedule_of()
    call = call_of(2, model=[torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    for frozen, times in ((False, 1), (False, 1), (True, 2), (True, 2), (False, 3)):
        call.model[1].weight.requires_grad_(not frozen)
        own._prepare(call)
        assert len(prepared) == times


def test_a_model_is_prepared_once_and_another_one_anew(prepared: list[Weights]) -> None:
    said: list[str] = []
    own: Any = schedule_of(said)
    own._decisions = Decisions(own.config, said.append)
    own._decisions.measured(Memory(activation_bytes=1, deferred_bytes=0))
    said.clear()
    first, second = call_of(2), call_of(2)
    assert own._prepare(first) is True and own._prepare(first) is True
    assert len(prepared) == 1 and len(said) == 1
    assert prepared[0].inspections == 1, "a host may have changed it since"
    assert "the backward of chunks [1] is fused" in said[0]
    assert not own._decisions.wants_measuring, "the first model is the one that was measured"
    closed: list[str] = []
    own._graphs = SimpleNamespace(close=lambda: closed.append("graphs"))
    assert own._prepare(second) is True
    assert len(prepared) == 2 and own._weight_gradients is prepared[1]
    assert own._decisions.wants_measuring and closed == ["graphs"] and own._graphs is None
    second.model[0] = call_of(2).model[0]
    assert own._prepare(second) is True and len(prepared) == 3, "the host wraps it in its own list"


def test_a_model_without_anything_to_defer_has_a_fused_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic, "WeightGradients", lambda chunks, say: Weights(chunks, (0, 0)))
    own: Any = schedule_of()
    assert own._prepare(call_of(2)) is False


def test_graphs_of_a_changed_model_are_made_anew(prepared: list[Weights]) -> None:
    own: Any = schedule_of()
    call, told = call_of(), []
    own._prepare(call)
    for kept in (True, False):
        own._graphs = SimpleNamespace(
            inspect=lambda kept=kept: kept, close=lambda: told.append("x")
        )
        own._make_graphs = lambda call: "new"
        own._prepare(call)
        assert (own._graphs == "new") is not kept
    assert told == ["x"]


def test_a_trained_parameter_of_two_chunks_is_refused(prepared: list[Weights]) -> None:
    """Their backwards have no fixed order, in which its gradients would be added."""
    own: Any = schedule_of()
    call = call_of(2)
    call.model = [torch.nn.Linear(2, 2) for _ in range(2)]
    call.model[1].bias = call.model[0].bias
    with pytest.raises(ConfigError, match=r"chunks 0 and 1 of a rank share .*bias and bias"):
        own._prepare(call)
    call.model[0].bias.requires_grad_(False)
    own._prepare(call)


def test_without_split_backwards_delayed_modules_are_refused(
    monkeypatch: pytest.MonkeyPatch, prepared: list[Weights]
) -> None:
    refused: list[Any] = []
    monkeypatch.setattr(dynamic, "refuse_delayed", lambda model, why: refused.append((model, why)))
    own: Any = schedule_of(split_backward=False)
    call = call_of()
    assert own._prepare(call) is False
    assert refused == [(call.model, "--no-dpp-split-backward runs no W tasks")] and not prepared


@pytest.mark.parametrize("group", [None, 0, 4])
def test_a_rank_sees_its_call_as_a_geometry(group: int | None) -> None:
    call = call_of(2, forward_only=True, num_microbatches=6)
    call.config.microbatch_group_size_per_vp_stage = group
    expected = Geometry(3, 2, 2, 6, forward_only=True, group=group or None, w_pieces=(2, 0))
    assert Topology((5, 6, 7), 2, 2).geometry(call, (2, 0)) == expected


def test_as_many_chunks_are_needed_as_the_config_says() -> None:
    DppSchedule._check_chunks(call_of(1))
    DppSchedule._check_chunks(call_of(2))
    call = call_of(2)
    call.config.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(ConfigError, match=r"2 chunks were given, but virtual.* is 3"):
        DppSchedule._check_chunks(call)


# Graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "made"), [("auto", True), ("on", True), ("off", False)])
def test_graphs_are_made_where_they_can_be_captured(
    prepared: list[Weights], setting: str, made: bool
) -> None:
    own: Any = schedule_of(cuda_graphs=setting)
    own._make_graphs = lambda call: "graphs"
    own._prepare(call_of())
    assert own._graphs is None, "there is nothing to capture with"
    own._forget_model = lambda: None
    own._capture = object()
    own._prepare(call_of())
    assert own._graphs == ("graphs" if made else None)


def test_graphs_have_as_many_slots_as_the_cap_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dynamic, "ChunkGraphs", lambda *_, **given: made.append(given))
    own: Any = schedule_of()
    own._make_graphs(call_of(captured_rows=lambda settings: [3]))
    assert made[0]["rows"] == [3] and made[0]["most"]() == 0.0
    own._decisions, own.peak_held = SimpleNamespace(cap=2.5), 1.0
    assert made[0]["most"]() == 2.5


def test_graphs_are_judged_by_the_largest_values_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    own: Any = schedule_of(said)
    own._session = SimpleNamespace(timer=SimpleNamespace(launch_share=lambda chunks: 0.1))
    own._stage_max = lambda call, *values: [9 * values[0], values[1]]
    monkeypatch.setattr(dynamic, "room", lambda: 1000)
    call = call_of()
    assert own._graphs_pay(call, [0]) is True and not said
    own._decisions = Decisions(own.config, lambda line: None)
    own._decisions.measured(Memory(activation_bytes=100, deferred_bytes=0))
    own.peak_held = 4.0
    assert own._filled_by_graphs() == pytest.approx(2.0 * 4.0 * 100 / 1000)
    own.peak_held = 6.0
    assert own._graphs_pay(call, [0]) is False
    assert "CUDA graphs: not used, as they may need 1.2 times the memory" in said[0]
    own.peak_held = 4.0
    call.config.recompute_granularity = "selective"
    assert own._graphs_pay(call, [0]) is True
    call.config.recompute_granularity = "full"
    assert own._graphs_pay(call, [0]) is False and "recompute-granularity full" in said[1]
    monkeypatch.setattr(dynamic, "room", lambda: 0)
    assert own._filled_by_graphs() > 1.0, "nothing is left"
    monkeypatch.setattr(dynamic, "room", lambda: None)
    assert own._filled_by_graphs() == 0.0, "the room is not known"


def test_boundaries_of_several_tensors_have_no_graphs() -> None:
    said: list[str] = []
    call = call_of(boundaries=lambda length: Boundaries(8, (8,), (4, 4)))
    own: Any = schedule_of(said)
    assert own._make_graphs(call) is None
    assert "several tensors (1 received, 2 sent)" in said[0]


# Memory -------------------------------------------------------------------------------------------


def measured_stage(sizes: Sequence[int], *, last: bool) -> Any:
    return SimpleNamespace(
        activation_bytes=dict(enumerate(sizes)), deferred_bytes={0: 30, 1: 50},
        is_last=lambda chunk: last and chunk == len(sizes) - 1,
    )  # fmt: skip


def test_the_head_is_told_apart_on_the_last_rank_with_weight_gradients_alone() -> None:
    own: Any = schedule_of()
    sizes = [100, 400]
    largest = LastRank(400)
    assert own._last_rank(measured_stage(sizes, last=True)) == largest
    own._weight_gradients = Weights([0, 1], (2, 2))
    assert own._last_rank(measured_stage(sizes, last=False)) == largest
    apart = own._last_rank(measured_stage(sizes, last=True))
    assert apart == LastRank.of(sizes, (2, 2)) != largest


def test_measured_memory_is_the_largest_of_the_stage_and_later_that_of_slots() -> None:
    own: Any = schedule_of()
    taken: list[Any] = []
    decisions: Any = SimpleNamespace(
        measured=taken.append, measured_slots=lambda size: taken.append(size), activation_bytes=30
    )
    asked: list[tuple[float, ...]] = []

    def largest(call: Any, *values: float) -> list[float]:
        asked.append(values)
        return [2 * value for value in values]

    own._stage_max = largest
    own._account(call_of(2), 1.5, decisions, measured_stage([100, 80], last=False))
    assert asked == [(150.0, 75.0, 1.0, 1.0)]
    expected = Memory(activation_bytes=300, deferred_bytes=150, head_room=2, last_layers=2)
    assert taken == [expected]
    own._account(call_of(2), 1.5, decisions, None)
    assert len(taken) == 1, "measured once"
    kept: list[float] = []
    graphs = {"awaits_size": True, "slot_bytes": lambda eager: 0, "keep_size": kept.append}
    own._graphs = SimpleNamespace(**graphs)
    own._account(call_of(2), 1.5, decisions, None)
    assert not kept and len(taken) == 1, "no graph has been captured yet"
    own._graphs.slot_bytes = lambda eager: eager + 10
    own._account(call_of(2), 1.5, decisions, None)
    assert kept == [80] and taken[1:] == [80]
    own._graphs.awaits_size = False
    own._account(call_of(2), 1.5, decisions, None)
    assert kept == [80]


def test_the_largest_of_a_stage_is_that_of_its_group_on_the_model_s_device() -> None:
    own: Any = schedule_of()
    asked: list[Any] = []

    def largest(*values: float, device: torch.device) -> list[float]:
        asked.append((values, device))
        return [9.0, 8.0]

    own._session = SimpleNamespace(group=SimpleNamespace(largest=largest))
    call = call_of(boundary_example=lambda: torch.zeros(1, device="meta"))
    assert own._stage_max(call, 3.0, 4.0) == [9.0, 8.0]
    assert asked == [((3.0, 4.0), torch.device("meta"))]


# One call -----------------------------------------------------------------------------------------


class Step:
    """A schedule with stand-ins for all that a call passes through; ``events`` has their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Any, **config: Any) -> None:
        self.events: list[str] = []
        self.stages: list[tuple[Any, ...]] = []
        self.accounts: list[tuple[float, bool]] = []
        self.wrapped: list[int] = []
        self.wants_measuring = True
        self.span, self.reduced_in = "", list[str]()
        own: Any = schedule_of(**config)
        self.schedule = own
        own._checked = lambda **_: call
        own._open_session = lambda _: SimpleNamespace(
            topology=Topology((0, 1, 2), 0, 1), rng=SimpleNamespace(wrap=self._wrap)
        )
        own._prepare = lambda _: bool(own.config.split_backward)
        own._weight_gradients = Weights([0], (2,))
        own._wants_rng = lambda model, ranks, *, forward_only: not forward_only and ranks == 3
        own._decisions = SimpleNamespace(wants_measuring=True)
        own._execute = self._execute
        own.recorder = SimpleNamespace(span=self._span, enabled=False)
        own._account = lambda _, longest, __, stage: self.accounts.append(
            (longest, stage is not None)
        )
        monkeypatch.setattr(dynamic, "Stage", self._stage)
        monkeypatch.setattr(dynamic.dataclasses, "replace", self._replace)

    def _replace(self, call: Any, **changes: Any) -> Any:
        return SimpleNamespace(**vars(call) | changes)

    def _wrap(self, function: Any, model: Any, iteration: int) -> str:
        assert function == "the user's"
        self.wrapped.append(iteration)
        return "seeded"

    def _stage(self, call: Any, rank: int, num_ranks: int, window: int, weights: Any) -> Any:
        self.stages.append((call.forward_step_func, rank, num_ranks, window, weights))
        note = self.events.append
        return SimpleNamespace(
            measure=lambda: note("measure"), open=lambda: note("open"), finish=self._finish,
            close=lambda: note("close"),
        )  # fmt: skip

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        self.span = name
        yield
        self.span = ""

    def _finish(self) -> list[str]:
        self.events.append("finish")
        self.reduced_in.append(self.span)
        return ["loss"]

    def _execute(self, *given: Any) -> tuple[int, int]:
        self.events.append(f"run {given[-1]} {given[-2]}")
        return 12, 8


def test_a_training_step_is_measured_run_accounted_and_finished_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of())
    own = step.schedule
    own.iteration = 7
    assert own() == ["loss"]
    assert step.events == ["measure", "open", "run 7 True", "finish", "close"]
    # Megatron's order holds p - rank activations here.
    assert step.stages == [("seeded", 0, 3, 3, own._weight_gradients)]
    assert step.wrapped == [7] and step.accounts == [(1.5, True)]
    assert own._weight_gradients.bindings == 1
    own._decisions.wants_measuring = False
    step.events.clear()
    own()
    assert step.events == ["open", "run 8 True", "finish", "close"]
    assert step.wrapped == [7, 8] and step.accounts[1:] == [(1.5, False)]
    assert step.reduced_in == ["grad-sync"] * 2, "the trace tells it from the tasks"


def test_an_evaluation_measures_nothing_and_takes_no_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of(forward_only=True))
    assert step.schedule() == ["loss"]
    assert step.events == ["open", "run 0 False", "finish", "close"]
    assert [stage[0] for stage in step.stages] == ["the user's"] and step.stages[0][-1] is None
    assert not step.wrapped and not step.accounts
    assert step.schedule.iteration == 1, "evaluations are numbered too"
    assert step.schedule._weight_gradients.bindings == 0


def test_a_fused_backward_gives_the_stage_no_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of(), split_backward=False)
    step.schedule()
    assert step.stages[0][-1] is None and step.events[2] == "run 0 False"


class FakeExecutor:
    """Notes its arguments, and runs nothing."""

    made: ClassVar[list[dict[str, Any]]] = []
    first_size: ClassVar[int | None] = 6

    def __init__(self, **given: Any) -> None:
        self.made.append(given)
        self.actions = ["a", "b", "c", "d"]
        self.overhead_ns = 8000

    def run(self) -> None:
        pass


@pytest.mark.parametrize(
    ("announced", "one_replica", "known"),
    [([8, 6, 4, 2], True, [8, 6, 4, 2]), ([8, 6, 4, 2], False, None), (None, True, None)],
)
def test_announced_sizes_serve_one_call_where_all_that_run_it_have_them(
    monkeypatch: pytest.MonkeyPatch, announced: Any, one_replica: bool, known: Any
) -> None:
    FakeExecutor.made.clear()
    monkeypatch.setattr(dynamic, "Executor", FakeExecutor)
    started: list[Any] = []
    decider = SimpleNamespace(start=started.append)
    monkeypatch.setattr(dynamic, "decider_for", lambda scheduler, channels, board: decider)
    asked: list[Any] = []
    scheduler = SimpleNamespace(peak_held=2.5, num_out_of_order=3)
    decisions: Any = SimpleNamespace(
        scheduler=lambda geometry, **given: asked.append(given) or scheduler,
        ran=lambda which, actions, *, split: asked.append((which, actions, split)),
    )
    consumed: list[Geometry] = []
    links = SimpleNamespace(
        channels=SimpleNamespace(receiving=[]), transport=SimpleNamespace(board=None),
        consumed=[4], consume=consumed.append,
    )  # fmt: skip
    session: Any = SimpleNamespace(
        links=links, group=StageGroup(one_replica=one_replica), timer=HostTimer(), injector=None,
        launch_ahead=False,
    )  # fmt: skip
    own: Any = schedule_of(timeout=7.0)
    own.policy = "megatron"
    if announced:
        told = list(announced)
        own.announce(told)
        told.clear()  # the host's own list
    geometry = Geometry(2, 0, 1, 4)
    stage: Any = SimpleNamespace(call=call_of())
    for sizes in (known, None):
        assert own._execute(session, decisions, stage, geometry, True, 5) == (8, 6)
        expected = {"split": True, "largest": 8, "sizes": sizes, "policy": "megatron"}
        assert asked == [expected, (scheduler, ["a", "b", "c", "d"], True)]
        asked.clear()
    assert started == [[4], [4]] and consumed == [geometry] * 2
    assert (own.peak_held, own.num_out_of_order, own.host_us_per_task) == (2.5, 3, 2.0)
    given = FakeExecutor.made[0]
    assert (given["iteration"], given["timeout"], given["sizes_agree"]) == (5, 7.0, one_replica)
    assert given["split_backward"] is True and given["launch_ahead"] is False
    scheduler.peak_held = 1.0
    for size, first in ((None, 8), (1, 1)):
        monkeypatch.setattr(FakeExecutor, "first_size", size)
        found = own._execute(session, decisions, stage, geometry, True, 6)
        assert found == (8, first), "a first size that is not known counts as the longest"
    assert own.peak_held == 2.5, "the largest of all calls"


def test_a_check_opens_no_links(monkeypatch: pytest.MonkeyPatch, prepared: list[Weights]) -> None:
    own: Any = schedule_of()
    lengths: list[int] = []
    call = call_of(2, boundaries=lengths.append)
    own._checked = lambda **_: call
    own.check()
    assert lengths == [8] and len(prepared) == 1 and own._session is None
    call.forward_only = True
    call.model = call_of(2).model
    own.check()
    assert len(prepared) == 1, "an evaluation needs no weight gradients"
    call.config.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(ConfigError, match="2 chunks were given"):
        own.check()
