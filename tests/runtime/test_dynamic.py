"""The dynamic schedule around its tasks: models, graphs, measurements and evaluations.

Links, models and stages are stand-ins that note what they are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.boundary import Boundaries, TokenCounter
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime import dynamic
from megatron.dpp.runtime.dynamic import DppSchedule
from megatron.dpp.runtime.session import check_chunks
from megatron.dpp.runtime.stage_group import StageGroup
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry


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
        "boundary_example": lambda *_: torch.zeros(3), "captured_rows": lambda settings: [],
        "padded_rows": lambda settings: None,
        "tokens": lambda longest, _=0: TokenCounter(longest, 4), "cut": None,
    }  # fmt: skip
    return SimpleNamespace(**usual | given)


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


def test_as_many_chunks_are_needed_as_the_config_says() -> None:
    check_chunks(call_of(1))
    check_chunks(call_of(2))
    call = call_of(2)
    call.config.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(ConfigError, match=r"2 chunks were given, but virtual.*=3 asks for 3"):
        check_chunks(call)


# One call -----------------------------------------------------------------------------------------


class FakeExecutor:
    """Notes its arguments, and runs nothing."""

    made: ClassVar[list[dict[str, Any]]] = []
    first_size: ClassVar[int | None] = 6

    def __init__(self, **given: Any) -> None:
        self.made.append(given | vars(given["iteration"]))
        self.actions = ["a", "b", "c", "d"]
        self.overhead_ns = 8000

    def run(self) -> None:
        raise NotImplementedError


class Step:
    """A schedule with stand-ins for all that a call passes through; ``events`` has their order."""

    @staticmethod
    def pads(call: Any) -> bool:
        """Rows stay as they are."""
        return False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Any, **config: Any) -> None:
        self.events: list[str] = []
        self.stages: list[tuple[Any, ...]] = []
        self.accounts: list[tuple[float, bool]] = []
        self.wrapped: list[int] = []
        self.asked: list[Any] = []
        self.started: list[Any] = []
        self.consumed: list[Geometry] = []
        self.span, self.reduced_in = "", list[str]()
        self.weights = Weights([0], (2,))
        self.closed: list[str] = []
        self.scheduler = SimpleNamespace(
            num_out_of_order=3, sizes=SimpleNamespace(unlike=lambda: None)
        )
        self.decisions = SimpleNamespace(
            wants_measuring=True, peak_held=2.5, activation_bytes=0.0,
            scheduler=lambda geometry, **given: self.asked.append(given) or self.scheduler,
            ran=lambda which, actions, *, backward: self.asked.append((which, actions, backward)),
        )  # fmt: skip
        links = SimpleNamespace(
            channels=SimpleNamespace(receiving=[]), transport=SimpleNamespace(board=None),
            consumed=[4], consume=self.consumed.append,
        )  # fmt: skip
        self.session: Any = SimpleNamespace(
            topology=Topology((0, 1, 2), 0, 1), links=links,
            group=StageGroup(one_replica=True), timer=HostTimer(), injector=None,
            launch_ahead=False, decisions=self.decisions,
        )  # fmt: skip
        self.current: Any = None
        self.injected_seconds = 0.25
        FakeExecutor.made.clear()
        monkeypatch.setattr(FakeExecutor, "run", lambda _: self.events.append("run"))
        monkeypatch.setattr(dynamic, "Executor", FakeExecutor)
        decider = SimpleNamespace(start=self.started.append)
        monkeypatch.setattr(dynamic, "decider_for", lambda scheduler, channels, board: decider)
        monkeypatch.setattr(dynamic, "Race", lambda *_: self)
        monkeypatch.setattr(dynamic, "TaskRng", lambda *_: SimpleNamespace(wrap=self._wrap))
        monkeypatch.setattr(dynamic, "pipeline_of", lambda *_: self.session.topology)
        monkeypatch.setattr(dynamic, "Sessions", lambda *_: self)
        monkeypatch.setattr(dynamic, "Prepared", lambda *_: self)
        monkeypatch.setattr(dynamic, "Stage", self._stage)
        monkeypatch.setattr(dynamic.dataclasses, "replace", self._replace)
        checked = SimpleNamespace(
            refuse_ordered=lambda: None, check_length=lambda longest: None, **vars(call)
        )
        monkeypatch.setattr(dynamic.StepCall, "checked", lambda **_: checked)
        monkeypatch.setattr("megatron.dpp.runtime.base.needs_task_rng", self._needs_rng)
        self.schedule = DppSchedule(DppConfig(**config), seed=1)
        recorder: Any = SimpleNamespace(
            span=self._span, enabled=False, counter=lambda name, value: None
        )
        self.schedule.recorder = recorder

    def _needs_rng(self, chunks: Any, *, forward_only: bool) -> bool:
        return not forward_only

    # Of the sessions.

    def open(self, call: Any) -> Any:
        self.current = self.session
        return self.session

    def close(self) -> None:
        self.closed.append("session")

    # Of what is prepared.

    num_pieces = (0, 2)

    def prepare(self, call: Any) -> Any:
        return self.weights if self.schedule.config.split_backward != "off" else None

    chosen = Backward()
    replays = False

    def begin(self, backward: Any, *, graphs: bool) -> None:
        assert graphs is self.binds_graphs

    @contextlib.contextmanager
    def bound(self, call: Any, recorder: Any) -> Iterator[None]:
        assert recorder is self.schedule.recorder
        self.events.append("bound")
        yield

    def account(self, call: Any, longest: float, stage: Any) -> None:
        self.accounts.append((longest, stage is not None))

    def forget(self) -> None:
        self.closed.append("prepared")

    # Of the race.

    binds_graphs = True
    record: ClassVar[dict[str, float]] = {}

    @contextlib.contextmanager
    def step(self, call: Any, keywords: Any) -> Iterator[Backward]:
        yield self.chosen

    def counted(self, call: Any) -> Any:
        return call

    def leaves(self, call: Any) -> bool:
        return False

    # Of the rest.

    def _replace(self, call: Any, **changes: Any) -> Any:
        return SimpleNamespace(**vars(call) | changes)

    def _wrap(self, function: Any, model: Any, iteration: int, *_: Any) -> str:
        assert function == "the user's"
        self.wrapped.append(iteration)
        return "seeded"

    def _stage(
        self, call: Any, rank: int, num_ranks: int, window: int, weights: Any, **more: Any
    ) -> Any:
        assert more == {"head": None, "slices": None}, "neither is asked for"
        self.stages.append((call.forward_step_func, rank, num_ranks, window, weights))
        note = self.events.append
        return SimpleNamespace(
            call=call, measure=lambda: note("measure"), open=lambda: note("open"),
            finish=self._finish, close=lambda: note("close"),
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


def test_a_training_step_is_measured_run_accounted_and_finished_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of())
    own = step.schedule
    own.iteration = 7
    assert own() == ["loss"]
    assert step.events == ["measure", "open", "bound", "run", "finish", "close"]
    # Megatron's order holds p - rank activations here.
    assert step.stages == [("seeded", 0, 3, 3, step.weights)]
    assert step.wrapped == [7] and step.accounts == [(8 / 6, True)]
    step.decisions.wants_measuring = False
    step.events.clear()
    own()
    assert step.events == ["open", "bound", "run", "finish", "close"]
    assert step.wrapped == [7, 8] and step.accounts[1:] == [(8 / 6, False)]
    assert step.reduced_in == ["grad-sync"] * 2, "the trace tells it from the tasks"
    assert [given["number"] for given in FakeExecutor.made] == [7, 8]


def test_an_evaluation_measures_nothing_and_takes_no_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of(forward_only=True, replays_routing=False))
    assert step.schedule() == ["loss"]
    assert step.events == ["open", "bound", "run", "finish", "close"]
    assert [stage[0] for stage in step.stages] == ["the user's"] and step.stages[0][-1] is None
    assert not step.wrapped and not step.accounts
    assert step.schedule.iteration == 1, "evaluations are numbered too"
    assert step.asked[0]["backward"].split is False and step.asked[0]["policy"] == "depth-first"


def test_a_fused_backward_gives_the_stage_no_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of(), split_backward="off")
    step.schedule()
    assert step.stages[0][-1] is None and FakeExecutor.made[0]["split_backward"] is False
    chosen = Step(monkeypatch, call_of())
    chosen.chosen, chosen.session.launch_ahead = Backward(split=False), True
    chosen.schedule()
    assert FakeExecutor.made[0]["launch_ahead"] is False, "whole backwards are fused"
    assert chosen.stages[0][-1] is None and chosen.asked[0]["backward"] == Backward(split=False)


def test_the_hosts_time_is_told_once_and_in_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamic, "TOLD_AFTER", 2)
    monkeypatch.setattr(dynamic, "host_line", lambda *_: "beside launches")
    monkeypatch.setattr(dynamic, "allocator_lines", lambda *_: ["and memory"])
    caplog.set_level("INFO", "megatron.dpp")
    step, told = Step(monkeypatch, call_of()), list[int]()
    for _ in range(3):
        step.schedule()
        told.append(len(caplog.messages))
    assert told == [0, 2, 2] and caplog.messages == ["beside launches", "and memory"]
    Step(monkeypatch, call_of(forward_only=True, replays_routing=False)).schedule()
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("announced", "one_replica", "known"),
    [([8, 6, 4, 2], True, [8, 6, 4, 2]), ([8, 6, 4, 2], False, None), (None, True, None)],
)
def test_announced_sizes_serve_one_call_where_all_that_run_it_have_them(
    monkeypatch: pytest.MonkeyPatch, announced: Any, one_replica: bool, known: Any
) -> None:
    step = Step(monkeypatch, call_of(), timeout=7.0)
    step.session.group = StageGroup(one_replica=one_replica)
    own = step.schedule
    if announced:
        told = list(announced)
        own.announce(told)
        told.clear()  # the host's own list
    for sizes in (known, None):
        own()
        expected = {
            "backward": Backward(), "largest": 8, "sizes": sizes, "kappa": 0.0,
            "policy": None,
        }  # fmt: skip
        assert step.asked == [expected, (step.scheduler, ["a", "b", "c", "d"], Backward())]
        step.asked.clear()
    assert step.started == [[4], [4]]
    assert step.consumed == [Geometry(3, 0, 1, 4, w_pieces=(2,))] * 2
    assert (own.peak_held, own.num_out_of_order, own.host_us_per_task) == (2.5, 3, 2.0)
    given = FakeExecutor.made[0]
    assert (given["number"], given["timeout"], given["sizes_agree"]) == (0, 7.0, one_replica)
    assert given["split_backward"] is True and given["launch_ahead"] is False
    step.decisions.peak_held = 1.0
    for size, longest in ((None, 1.0), (1, 8.0)):
        monkeypatch.setattr(FakeExecutor, "first_size", size)
        own()
        assert step.accounts[-1][0] == longest, "one that is not known counts as the longest"
    assert own.peak_held == 2.5, "the largest of all calls"


def test_a_schedule_closes_its_session_and_what_it_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch, call_of())
    assert step.schedule.injected_seconds == 0.25
    step.schedule.close()
    assert step.closed == ["session", "prepared"]


def test_a_check_opens_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    call = call_of(2, boundaries=lengths.append)
    step, models = Step(monkeypatch, call), list[Any]()
    monkeypatch.setattr(step, "prepare", lambda given: models.append(given.model))
    step.schedule.check()
    assert lengths == [8] and models == [call.model] and step.current is None


def test_a_check_of_an_evaluation_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, call_of(forward_only=True))
    monkeypatch.setattr(step, "prepare", lambda given: pytest.fail("no weight gradients"))
    step.schedule.check()


def test_a_check_counts_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(2)
    call.config.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(ConfigError, match="2 chunks were given"):
        Step(monkeypatch, call).schedule.check()
