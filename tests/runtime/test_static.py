"""megatron-core's schedule behind ours: what surrounds it, and how often links are opened."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.core.static import Step
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime import static
from megatron.dpp.runtime.static import StaticSchedule
from megatron.dpp.runtime.topology import Topology


def schedule_of(said: list[str] | None = None, **config: Any) -> Any:
    return StaticSchedule(
        DppConfig(**config), seed=1, log=([] if said is None else said).append, capture=None
    )


class Around:
    """A call whose surroundings are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.config = SimpleNamespace(
            delay_wgrad_compute=False, overlap_moe_expert_parallel_comm=False
        )
        self.told: list[str] = []
        self.given: list[dict[str, Any]] = []
        self.model = torch.nn.Identity()
        patch = monkeypatch.setattr
        patch(static, "pipeline_of", lambda *_: Topology(tuple(range(ranks)), ranks - 1, 1))
        patch(static, "get_model_config", lambda _: self.config)
        patch(static, "get_forward_backward_func", lambda: self._run)
        patch(static, "refuse_delayed", lambda chunks, why: self.told.append(why))
        patch(static, "TaskRng", self._rng)
        patch("megatron.dpp.runtime.base.needs_task_rng", lambda *_, **__: False)

    @staticmethod
    def _rng(*given: int) -> Any:
        assert given == (1, 2, 1), "seed, ranks and rank, as of the dynamic schedule"
        return SimpleNamespace(wrap=lambda function, chunks, number: f"{function} seeded {number}")

    def _run(self, **keywords: Any) -> list[str]:
        self.given.append(keywords)
        return ["loss"]

    def call(self, own: Any, **more: Any) -> list[str]:
        found: list[str] = own(model=self.model, forward_step_func="user's", **more)
        return found


def test_each_call_has_a_number_and_random_states_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around, own = Around(monkeypatch), schedule_of()
    asked: list[bool] = []

    def wants(chunks: Any, *, forward_only: bool) -> bool:
        assert chunks == [around.model]
        asked.append(forward_only)
        return not forward_only

    monkeypatch.setattr("megatron.dpp.runtime.base.needs_task_rng", wants)
    own.iteration = 4
    assert around.call(own) == ["loss"]
    around.call(own, forward_only=True)
    around.call(own)
    functions = [given["forward_step_func"] for given in around.given]
    assert functions == ["user's seeded 4", "user's", "user's seeded 6"]
    assert asked == [False, True, False] and own.iteration == 7
    assert own.injected_seconds == 0.0


@pytest.mark.parametrize(
    ("delays", "overlaps", "refused"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_delayed_weight_gradients_are_refused_unless_megatron_core_runs_them(
    monkeypatch: pytest.MonkeyPatch, delays: bool, overlaps: bool, refused: int
) -> None:
    around, own = Around(monkeypatch), schedule_of()
    around.config.delay_wgrad_compute = delays
    around.config.overlap_moe_expert_parallel_comm = overlaps
    around.call(own)
    assert around.told == ["a static schedule runs no W tasks"] * refused


@pytest.mark.parametrize(
    ("transport", "ranks", "opened"), [("auto", 2, 0), ("shm", 2, 1), ("shm", 1, 0)]
)
def test_our_channels_are_used_where_a_kind_is_named_and_there_is_a_neighbour(
    monkeypatch: pytest.MonkeyPatch, transport: str, ranks: int, opened: int
) -> None:
    around, own = Around(monkeypatch, ranks), schedule_of(transport=transport)
    told: list[str] = []

    class Over:
        def __enter__(self) -> None:
            told.append("over")

        def __exit__(self, *_: object) -> None:
            told.append("end")

    monkeypatch.setattr(static, "over_channels", lambda exchange: Over())
    call = SimpleNamespace(length=0, boundaries=lambda length: Boundaries(0, (8,), (8,)))
    transport = SimpleNamespace(links=list, close=lambda: None)
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    monkeypatch.setattr(static, "ring_channels", lambda *_: [])
    monkeypatch.setattr(static, "open_links", lambda *_: transport)
    monkeypatch.setattr(static, "ChannelExchange", lambda *_: "exchange")
    around.call(own)
    assert told == ["over", "end"] * opened


@pytest.mark.parametrize(("received", "sent"), [(2, 1), (1, 2)])
def test_links_are_kept_until_a_boundary_is_larger(
    monkeypatch: pytest.MonkeyPatch, received: int, sent: int
) -> None:
    """The larger of those that a rank receives and sends counts."""
    said: list[str] = []
    own = schedule_of(said, transport="shm", slots=3)
    sizes = [8]
    call = SimpleNamespace(
        length=0,
        boundaries=lambda length: Boundaries(
            0, (sizes[-1] * received // 2,), (sizes[-1] * sent // 2,)
        ),
    )
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    rings: list[tuple[Any, ...]] = []
    closed: list[str] = []
    link = SimpleNamespace(peer=6, kind="shm", reason="same host")
    transport = SimpleNamespace(
        links=lambda: [link], close=lambda: closed.append("x"), outgoing=[], incoming=[]
    )
    monkeypatch.setattr(static, "ring_channels", lambda *given: rings.append(given) or ["specs"])
    monkeypatch.setattr(static, "open_links", lambda specs, config: transport)
    topology = Topology((5, 6), 1, 1)
    first = own._open({}, topology)
    assert own._links() is transport and said == ["static pipeline: link to 6: shm (same host)"]
    for size in (8, 4):
        sizes.append(size)
        assert own._open({}, topology) is first
    sizes.append(10)
    assert own._open({}, topology) is not first and closed == ["x"]
    assert rings == [((5, 6), 1, 8, 3), ((5, 6), 1, 10, 3)]
    own.close()
    own.close()
    assert closed == ["x", "x"] and own._links() is None
    own._open({}, topology)
    assert len(rings) == 3


class Delays:
    """An injector that notes tasks."""

    def __init__(self, *, messages: bool) -> None:
        self.tasks: list[Task] = []
        self.delays_messages = messages

    def factor(self, task: Task) -> float:
        self.tasks.append(task)
        return 1.5

    def seconds(self, task: Task) -> float:
        return 0.25


def test_tasks_cost_a_share_of_the_rank_and_a_backward_twice_as_much() -> None:
    """As in the dynamic schedule, so that delays cover the same share of the work."""
    own, injected = schedule_of(), Delays(messages=False)
    own._injector = injected
    told: list[tuple[Any, ...]] = []
    own._timer = SimpleNamespace(
        prolong=lambda *given: told.append(given), launched=lambda key: told.append((key,))
    )
    after = own._prolonger(Topology((0, 1), 0, 4), 9)
    for step in (Step("F", 0, 1), Step("B", 3, 2), Step("F", 2, 3)):
        after(step, None)
    assert injected.tasks == [
        Task(9, "F", 0, 1, 0.0, 0.25), Task(9, "B", 3, 2, 0.25, 0.5), Task(9, "F", 2, 3, 0.75, 0.25)
    ]  # fmt: skip
    assert told[:2] == [(("F", 0), 1.5, 0.25), (("F", 0),)] and len(told) == 6
    again = own._prolonger(Topology((0, 1), 0, 4), 10)
    again(Step("F", 0, 0), None)
    assert injected.tasks[-1].begin == 0.0, "each iteration's work begins at 0"


@pytest.mark.parametrize(
    ("inject", "transport", "said"),
    [("message-delay:5ms", "auto", 1), ("message-delay:5ms", "shm", 0), ("delay:5ms", "auto", 0)],
)
def test_messages_that_cannot_be_delayed_are_said_once(
    inject: str, transport: str, said: int
) -> None:
    lines: list[str] = []
    own = schedule_of(lines, inject=inject, transport=transport)
    topology = Topology((0, 1), 0, 1)
    assert own._injector_of(topology) is own._injector_of(topology)
    assert len(lines) == said


@pytest.mark.parametrize(("inject", "delayed"), [("slow-link:0-1:5ms", True), ("delay:5ms", False)])
def test_messages_are_delayed_by_the_places_of_their_ranks(
    inject: str, delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline of the ranks 5, 6 and 7."""
    call = SimpleNamespace(length=0, boundaries=lambda length: Boundaries(0, (8,), (8,)))
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    incoming = [SimpleNamespace(source=source, destination=6) for source in (5, 7)]
    inner = SimpleNamespace(
        rank=6, board=None, incoming=incoming, outgoing=[], close=lambda: None,
        links=lambda: [SimpleNamespace(peer=5, kind="shm", reason="same host")],
    )  # fmt: skip
    monkeypatch.setattr(static, "ring_channels", lambda *_: [])
    monkeypatch.setattr(static, "open_links", lambda *_: inner)
    monkeypatch.setattr(static, "ChannelExchange", lambda *_: "exchange")
    own = schedule_of(inject=inject, transport="shm")
    own._open({}, Topology((5, 6, 7), 1, 1))
    assert (own._transport is inner) is not delayed
    if delayed:
        assert own._transport._pairs == [(0, 1), (2, 1)]
        seconds = [own._transport._injector.message_seconds(*pair, 0) for pair in ((0, 1), (2, 1))]
        assert seconds == [0.005, 0.0]


def test_delays_are_those_of_the_dynamic_schedule_with_the_same_seed() -> None:
    own, inject = schedule_of(inject="jitter:0.3"), "jitter:0.3"
    injector = own._injector_of(Topology((5, 6, 7), 1, 2))
    task = Task(4, "F", 1, 3, 0.0, 0.5)
    usual = [Injector(inject, 1, 3, seed, num_chunks=2).factor(task) for seed in (1, 0)]
    assert injector.factor(task) == usual[0] != usual[1]


def test_tasks_are_timed_although_nothing_is_chosen_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An injected factor is one of the task's own time."""
    asked: list[tuple[Any, bool]] = []

    def timer(config: DppConfig, *, follow: bool) -> str:
        asked.append((config, follow))
        return "timer"

    monkeypatch.setattr(static, "timer_for", timer)
    own = schedule_of(inject="slow-rank:1:2")
    assert own._timer == own._timer == "timer" and asked == [(own.config, True)]


@pytest.mark.parametrize("capture", ["a test's", None])
@pytest.mark.parametrize("setting", ["off", "auto", "on"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_only_on_captures_graphs_and_an_evaluation_replays_none(
    monkeypatch: pytest.MonkeyPatch, forward_only: bool, setting: str, capture: Any
) -> None:
    """They are captured of a training step, whose dropout an evaluation has not."""
    around, bound = Around(monkeypatch, ranks=1), list[str]()
    own = StaticSchedule(DppConfig(cuda_graphs=setting), seed=1, capture=capture)
    call = SimpleNamespace(
        boundary_example=lambda config: "example", model=[around.model],
        captured_rows=lambda config: [],
    )  # fmt: skip
    graphs = SimpleNamespace(bound=lambda example: contextlib.nullcontext(bound.append(example)))
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    monkeypatch.setattr(static, "ChunkGraphs", lambda *_, **__: graphs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    around.call(own, forward_only=forward_only)
    captures = setting == "on" and capture is not None and not forward_only
    assert bound == ["example"] * captures


def test_graphs_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    made: list[Any] = []

    def graphs(
        model: Any, weights: None, log: Any, pays: Any, capture: Any, *, rows: Any, most: Any
    ) -> Any:
        assert weights is None and pays([0]) and rows == [4, 8] and most() == 5
        number = len(made)
        made.append(SimpleNamespace(close=lambda: closed.append(number)))
        return made[-1]

    monkeypatch.setattr(static, "ChunkGraphs", graphs)
    own = schedule_of()
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 2))
    usual = {
        "pg_collection": None, "num_microbatches": 8, "forward_only": False, "cut": None,
        "captured_rows": lambda config: [4, 8],
        "config": SimpleNamespace(microbatch_group_size_per_vp_stage=2),
    }  # fmt: skip
    one, other = (SimpleNamespace(model=[torch.nn.Identity()], **usual) for _ in range(2))
    assert own._graphs_of(one) is own._graphs_of(one) is made[0]
    assert own._graphs_of(other) is made[1] and closed == [0]
    other.model[0] = torch.nn.Identity()
    assert own._graphs_of(other) is made[2], "the host wraps it in its own list"
    own.close()
    own.close()
    assert closed == [0, 1, 2] and not own._graphed, "the model may be freed"


@pytest.mark.parametrize(("group", "most"), [(None, 5), (0, 5), (2, 5), (4, 7)])
def test_graphs_have_slots_for_the_groups_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, group: int | None, most: int
) -> None:
    monkeypatch.setattr(static, "pipeline_of", lambda *_: Topology((0, 1), 1, 2))
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=group)
    call: Any = SimpleNamespace(
        model=[],
        pg_collection=None,
        num_microbatches=8,
        forward_only=False,
        config=config,
        cut=None,
    )
    assert static.most_held(call) == most, "the warm-up of a larger group holds more"


@pytest.mark.parametrize(
    ("adjusts", "ranks", "sends", "refused"),
    [(True, 2, (4, 4), True), (True, 2, (4,), False), (False, 2, (4, 4), False),
     (True, 1, (4, 4), False)],
)  # fmt: skip
def test_several_tensors_per_boundary_are_refused(
    monkeypatch: pytest.MonkeyPatch, adjusts: bool, ranks: int, sends: Any, refused: bool
) -> None:
    around, own = Around(monkeypatch, ranks), schedule_of()
    call = SimpleNamespace(length=0, boundaries=lambda length: Boundaries(4, (4,), sends))
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    adjust = (lambda *_: None) if adjusts else None
    refusal = pytest.raises(ConfigError, match="1 tensors received and 2 sent per stage boundary")
    with refusal if refused else contextlib.nullcontext():
        around.call(own, adjust_tensor_shapes_fn=adjust)
    assert bool(around.given) is not refused
