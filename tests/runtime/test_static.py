"""megatron-core's schedule behind ours: what surrounds it, and how often links are opened."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime import static
from megatron.dpp.runtime.static import StaticSchedule
from megatron.dpp.runtime.static_exchange import Step
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import Direction, Message


def schedule_of(said: list[str] | None = None, **config: Any) -> Any:
    return StaticSchedule(
        DppConfig(**config), seed=1, log=([] if said is None else said).append, capture=None
    )


class Around:
    """A call whose surroundings are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.given: list[dict[str, Any]] = []
        self.model = torch.nn.Identity()
        patch = monkeypatch.setattr
        self.topology = Topology(tuple(range(ranks)), ranks - 1, 1)
        self._after: list[Any] = []
        patch(static, "pipeline_of", lambda *_: self.topology)
        patch(static, "around_steps", lambda _, after: nullcontext(self._after.append(after)))
        patch(static, "static_schedule", lambda original, keywords: self._run)
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

    def after_steps(self, own: Any) -> Any:
        """Makes a call; returns what it runs after each of its tasks."""
        self.call(own)
        return self._after[-1] if self._after else None


@pytest.mark.parametrize(("ranks", "task_rng"), [(2, True), (2, False), (1, True)])
def test_each_call_has_a_number_and_random_states_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, task_rng: bool
) -> None:
    """A single stage keeps Megatron's."""
    around, own = Around(monkeypatch, ranks), schedule_of(task_rng=task_rng)
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
    own_states = ranks == 2 and task_rng
    seeded = [" seeded 4", "", " seeded 6"] if own_states else [""] * 3
    assert functions == [f"user's{each}" for each in seeded]
    assert asked == [False, True, False] * own_states and own.iteration == 7
    assert own.injected_seconds == 0.0


class Links:
    """The links that a schedule of the ranks 5, 6 and 7 opens on 6, which are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.receives = self.sends = 8
        self.rings: list[tuple[Any, ...]] = []
        self.used: list[Any] = []
        self.told: list[str] = []
        call = SimpleNamespace(
            length=0, boundaries=lambda length: Boundaries(0, (self.receives,), (self.sends,))
        )
        incoming = [
            SimpleNamespace(source=source, destination=6, direction=direction)
            for source, direction in zip((5, 7), Direction, strict=True)
        ]
        message = Message(torch.zeros(1), 0, 0, 0, 1, 0, 0)
        self.transport = SimpleNamespace(
            rank=6, board=None, incoming=incoming, outgoing=[],
            poll=lambda: [1, 1], take=lambda channel: message,
            links=lambda: [SimpleNamespace(peer=5, kind="shm", reason="same host")],
            close=lambda: self.told.append("closed"), abort=lambda why: self.told.append("aborted"),
        )  # fmt: skip
        patch = monkeypatch.setattr
        patch(static.StepCall, "checked", lambda **_: call)
        patch(static, "ring_channels", lambda *given: self.rings.append(given))
        patch(static, "open_links", lambda *_: self.transport)
        patch(static, "over_channels", self._over)

    @contextlib.contextmanager
    def _over(self, exchange: Any) -> Iterator[None]:
        self.used.append(exchange)
        yield
        self.told.append("over")


@pytest.mark.parametrize(
    ("transport", "ranks", "opened"), [("auto", 2, 0), ("shm", 2, 1), ("shm", 1, 0)]
)
def test_our_channels_are_used_where_a_kind_is_named_and_there_is_a_neighbour(
    monkeypatch: pytest.MonkeyPatch, transport: str, ranks: int, opened: int
) -> None:
    around, links = Around(monkeypatch, ranks), Links(monkeypatch)
    around.call(schedule_of(transport=transport))
    assert len(links.used) == opened and links.told == ["over"] * opened


@pytest.mark.parametrize(("received", "sent"), [(2, 1), (1, 2)])
def test_links_are_kept_until_a_boundary_is_larger(
    monkeypatch: pytest.MonkeyPatch, received: int, sent: int
) -> None:
    """The larger of those that a rank receives and sends counts. Peers hear of an error."""
    said: list[str] = []
    own, around, links = (
        schedule_of(said, transport="shm", slots=3), Around(monkeypatch), Links(monkeypatch)
    )  # fmt: skip
    for size in (8, 8, 4, 10):
        links.receives, links.sends = size * received // 2, size * sent // 2
        around.call(own)
    first, second, third, last = links.used
    assert first is second is third is not last
    assert links.rings == [((0, 1), 1, 8, 3), ((0, 1), 1, 10, 3)]
    assert links.told == ["over"] * 3 + ["closed", "over"]
    assert said == ["static pipeline: link to 5: shm (same host)"] * 2
    links.told.clear()
    with pytest.raises(ValueError, match="a host's"), own:
        raise ValueError("a host's")
    own.close()
    assert links.told == ["aborted", "closed"]
    around.call(own)
    assert len(links.rings) == 3


class Delays:
    """An injector that notes tasks."""

    delays_messages = False

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def factor(self, task: Task) -> float:
        self.tasks.append(task)
        return 1.5

    def seconds(self, task: Task) -> float:
        return 0.25


class Timer:
    """A timer that notes what it hears; ``follow`` of each that was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.asked: list[bool] = []
        monkeypatch.setattr(static, "timer_for", self._for)

    def _for(self, *, follow: bool) -> Timer:
        self.asked.append(follow)
        return self

    def prolong(self, *given: Any) -> None:
        self.told.append(given)

    def launched(self, key: tuple[str, int]) -> None:
        self.told.append((key,))


def test_tasks_cost_a_share_of_the_rank_and_a_backward_twice_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the dynamic schedule, so that delays cover the same share of the work. Tasks are
    timed although nothing is chosen by it: a factor is one of the task's own time.
    """
    around, injected, timer = Around(monkeypatch), Delays(), Timer(monkeypatch)
    monkeypatch.setattr(static, "Injector", lambda *_, **__: injected)
    around.topology = Topology((0, 1), 1, 4)
    own = schedule_of(inject="delay:1ms")
    own.iteration = 9
    after = around.after_steps(own)
    for step in (Step("F", 0, 1), Step("B", 3, 2), Step("F", 2, 3)):
        after(step, None)
    assert injected.tasks == [
        Task(9, "F", 0, 1, 0.0, 0.25), Task(9, "B", 3, 2, 0.25, 0.5), Task(9, "F", 2, 3, 0.75, 0.25)
    ]  # fmt: skip
    assert timer.told[:2] == [(("F", 0), 1.5, 0.25), (("F", 0),)] and len(timer.told) == 6
    around.after_steps(own)(Step("F", 0, 0), None)
    assert injected.tasks[-1].begin == 0.0, "each iteration's work begins at 0"
    assert timer.asked == [True]


def test_delays_are_those_of_the_dynamic_schedule_with_the_same_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around, timer, inject = Around(monkeypatch), Timer(monkeypatch), "jitter:0.3"
    around.topology = Topology((5, 6, 7), 1, 2)
    own = schedule_of(inject=inject)
    own.iteration = 4
    around.after_steps(own)(Step("F", 1, 3), None)
    task = Task(4, "F", 1, 3, 0.0, 0.5)
    usual = [Injector(inject, 1, 3, seed, num_chunks=2).factor(task) for seed in (1, 0)]
    assert timer.told[0][1] == usual[0] != usual[1]


@pytest.mark.parametrize(
    ("inject", "transport", "said"),
    [("message-delay:5ms", "auto", 1), ("message-delay:5ms", "shm", 0), ("delay:5ms", "auto", 0)],
)
def test_messages_that_cannot_be_delayed_are_said_once(
    monkeypatch: pytest.MonkeyPatch, inject: str, transport: str, said: int
) -> None:
    lines: list[str] = []
    own, around = schedule_of(lines, inject=inject, transport=transport), Around(monkeypatch)
    Links(monkeypatch)
    around.topology = Topology((5, 6, 7), 1, 1)
    for _ in range(2):
        around.after_steps(own)
    assert sum("delays no messages" in line for line in lines) == said


@pytest.mark.parametrize(
    ("inject", "late_ns"), [("slow-link:0-1:5ms", 5_000_000), ("delay:5ms", 0)]
)
def test_messages_are_delayed_by_the_places_of_their_ranks(
    inject: str, late_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, links = Around(monkeypatch), Links(monkeypatch)
    around.topology = Topology((5, 6, 7), 1, 1)
    around.after_steps(schedule_of(inject=inject, transport="shm"))
    transport = links.used[0].transport
    assert (transport is links.transport) is not late_ns
    assert list(transport.poll()) == [1, 1]
    assert [transport.take(channel).arrived_ns for channel in range(2)] == [late_ns, 0]


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
    graphs = SimpleNamespace(bound=lambda example: nullcontext(bound.append(example)))
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
        made.append(number)
        return SimpleNamespace(
            close=lambda: closed.append(number), bound=lambda example: nullcontext()
        )

    monkeypatch.setattr(static, "ChunkGraphs", graphs)
    around = Around(monkeypatch)
    around.topology = Topology((0, 1), 1, 2)
    own = StaticSchedule(DppConfig(cuda_graphs="on"), seed=1, capture=lambda *_: None)  # type: ignore[arg-type,return-value]
    usual = {
        "pg_collection": None, "num_microbatches": 8, "forward_only": False, "cut": None,
        "captured_rows": lambda config: [4, 8], "boundary_example": lambda config: None,
        "config": SimpleNamespace(microbatch_group_size_per_vp_stage=2),
    }  # fmt: skip
    call = SimpleNamespace(model=[torch.nn.Identity()], **usual)
    monkeypatch.setattr(static.StepCall, "checked", lambda **_: call)
    for other, number in ((None, 0), (None, 0), (torch.nn.Identity(), 1)):
        if other is not None:
            call.model[0] = other  # the host wraps it in its own list
        around.call(own)
        assert made[-1] == number and closed == list(range(number))
    kept = weakref.ref(call.model.pop())
    del other
    own.close()
    own.close()
    assert closed == [0, 1] and kept() is None, "the model may be freed"


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
    with refusal if refused else nullcontext():
        around.call(own, adjust_tensor_shapes_fn=adjust)
    assert bool(around.given) is not refused
