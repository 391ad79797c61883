"""The sessions of the dynamic schedule: when links are opened anew, and as what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.config import DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime import dynamic
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.delayed import DelayedTransport
from megatron.dpp.runtime.stage_group import StageGroup
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, Memory
from megatron.dpp.transport.fake import FakeNetwork
from tests.runtime.test_dynamic import call_of, schedule_of


class Opened:
    """A schedule whose links are opened by noting the length that they have room for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.schedule: Any = schedule_of(**config)
        self.topology = Topology((0, 1), 0, 1)
        self.lengths: list[int] = []
        self.closed: list[str] = []
        monkeypatch.setattr(dynamic, "pipeline_of", lambda *_: self.topology)
        self.schedule._connect = self._connect

    def _connect(self, call: Any, topology: Topology, boundaries: Boundaries) -> Any:
        self.lengths.append(boundaries.usual_bytes)
        transport = SimpleNamespace(close=lambda: self.closed.append("links"))
        return SimpleNamespace(
            topology=topology, boundaries=boundaries, links=SimpleNamespace(transport=transport),
            timer=SimpleNamespace(injected_seconds=1.5), injector=None,
        )  # fmt: skip

    def call(self, length: int) -> Any:
        given = call_of(length=length, longest=lambda most: max(length, most))
        return self.schedule._open_session(given)


def test_links_are_kept_until_a_longer_sequence_or_another_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths that grow in many steps open links in few."""
    opened = Opened(monkeypatch)
    first = opened.call(8)
    assert opened.call(8) is opened.call(4) is first
    assert opened.lengths == [8] and not opened.closed
    opened.call(9)
    assert opened.lengths == [8, 16] and opened.closed == ["links"]
    opened.call(16)
    assert opened.lengths == [8, 16]
    opened.call(17)
    assert opened.lengths == [8, 16, 32], "twice what the links had room for"
    opened.call(80)
    assert opened.lengths == [8, 16, 32, 80]
    opened.topology = Topology((0, 2), 0, 1)
    opened.call(8)
    assert opened.lengths[4:] == [8], "another pipeline's lengths are no measure"
    opened.topology = Topology((0, 2), 0, 2)
    opened.call(8)
    assert opened.lengths[4:] == [8, 8], "another chunk has channels of its own"
    assert opened.closed == ["links"] * 5


def test_a_shape_that_the_kept_links_have_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its usual tensor fits, what ``adjust_tensor_shapes_fn`` makes of it does not."""
    opened = Opened(monkeypatch)
    opened.call(8)
    larger = call_of(boundaries=lambda length: Boundaries(8, (8,), (9,)))
    with pytest.raises(ConfigError, match="would send 1 tensors of up to 9 bytes"):
        opened.schedule._open_session(larger)
    assert opened.lengths == [8] and not opened.closed


def test_links_have_room_for_the_longest_known_sequence_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch, max_tokens=32)
    opened.call(8)
    opened.call(20)
    assert opened.lengths == [32]


def test_links_have_room_for_a_wider_model_whose_length_is_nominal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An actor and a wider critic in one process, with ``seq_length`` 1: what counts is the longest
    microbatch of each.
    """
    opened = Opened(monkeypatch, max_tokens=32)

    def call(width: int) -> None:
        sizes = lambda length: Boundaries(width * length, (width * length,), (width * length,))  # noqa: E731
        given = call_of(length=1, longest=lambda most: max(1, most), boundaries=sizes)
        opened.schedule._open_session(given)

    for width in (1, 2, 1, 2):
        call(width)
    assert opened.lengths == [32, 64]


def test_a_schedule_closes_twice_and_keeps_what_it_was_delayed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch)
    own = opened.schedule
    assert own.injected_seconds == 0.0 and own._links() is None
    session = opened.call(8)
    assert own._links() is session.links.transport
    own._decisions = Decisions(own.config, lambda line: None)
    monkeypatch.setattr(Decisions, "close", lambda self: opened.closed.append("the recording"))
    own._decisions.measured(Memory(activation_bytes=1, deferred_bytes=0))
    assert own.injected_seconds == 1.5
    opened.call(9)
    assert own._decisions.wants_measuring, "longer sequences are measured anew"
    assert own.injected_seconds == 3.0
    own._graphs = SimpleNamespace(close=lambda: opened.closed.append("graphs"))
    for _ in range(2):
        own.close()
        assert own.injected_seconds == 3.0 and own._links() is None and own._decisions is None
    assert opened.closed == ["links", "links", "the recording", "graphs"]


@pytest.mark.parametrize(
    ("inject", "late"), [(None, False), ("jitter:0.1", False), ("slow-link:0-1:5ms", True)]
)
def test_links_have_as_many_slots_as_the_config_says_and_are_late_where_it_says_so(
    monkeypatch: pytest.MonkeyPatch, inject: str | None, late: bool
) -> None:
    asked: list[Any] = []

    def opened(specs: Any, config: DppConfig, stage_ranks: Any) -> Any:
        asked.append(stage_ranks)
        return FakeNetwork(list(specs)).transport(4)

    monkeypatch.setattr(dynamic, "open_links", opened)
    injector = Injector(inject, 0, 2) if inject else None
    place, boundaries = Topology((4, 6), 0, 1), Boundaries(8, (8,), (8,))
    links = dynamic._open_links(place, boundaries, (4, 5), DppConfig(slots=5), injector)
    assert [spec.depth for spec in links.channels.specs] == [5, 5] and asked == [(4, 5)]
    assert isinstance(links.transport, DelayedTransport) is late


class Connected:
    """The links that :meth:`DppSchedule._connect` opens, on one member of a stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, member: int | None) -> None:
        self.given: tuple[Any, ...] = ()
        self.follow: list[bool] = []
        self.reason: str | None = None
        self.link = SimpleNamespace(peer=6, kind="shm", reason="same host")
        board = None if member is None else SimpleNamespace(index=member)
        self.links = SimpleNamespace(
            transport=SimpleNamespace(board=board, links=lambda: [self.link])
        )
        group = StageGroup((5, 9) if member is not None else ())
        monkeypatch.setattr(dynamic, "stage_group_of", lambda call: group)
        monkeypatch.setattr(dynamic, "why_not_ahead", lambda *_: self.reason)
        monkeypatch.setattr(dynamic, "_replica_of", lambda call: 3)
        monkeypatch.setattr(dynamic, "_open_links", self._open)
        monkeypatch.setattr(dynamic, "timer_for", self._timer)

    def _open(self, *given: Any) -> Any:
        self.given = given
        return self.links

    def _timer(self, config: DppConfig, *, follow: bool) -> HostTimer:
        self.follow.append(follow)
        return HostTimer()


@pytest.mark.parametrize(("member", "leads"), [(None, True), (0, True), (1, False)])
def test_only_followers_follow_and_leave_the_recording_to_their_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, member: int | None, leads: bool
) -> None:
    connected, said = Connected(monkeypatch, member), []
    own: Any = schedule_of(said, record=str(tmp_path / "record"))
    topology, boundaries = Topology((5, 6), 0, 1), Boundaries(8, (8,), (8,))
    session = own._connect(call_of(), topology, boundaries)
    ranks = (5, 9) if member is not None else ()
    assert connected.given == (topology, boundaries, ranks, own.config, None)
    assert connected.follow == [not leads]
    assert said == ["dynamic pipeline: rank 5 -> 6: shm (same host)"]
    assert session.launch_ahead and session.injector is None
    kept = own._decisions
    kept.scheduler(Geometry(2, 0, 1, 2), split=False)
    kept.close()
    names = [path.name for path in tmp_path.iterdir()]
    assert names == (["record.replica3.rank0"] if leads else [])
    own._connect(call_of(), topology, boundaries)
    assert own._decisions is kept, "a recording goes on when links are opened anew"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_one_of_its_pipeline(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Of every replica, whose ranks have other numbers in the job; draws are those of the seed."""
    connected, inject = Connected(monkeypatch, None), "slow-rank:1:2,jitter:0.3"
    own: Any = schedule_of(inject=inject)
    own._seed = 5
    session = own._connect(call_of(), Topology((6, 7), rank, 2), Boundaries(8, (8,), (8,)))
    assert session.injector is connected.given[-1]
    task = Task(4, "F", 1, 3, 0.0, 0.5)
    expected = Injector(inject, rank, 2, 5, num_chunks=2).factor(task)
    assert session.injector.factor(task) == expected
    slow = Injector("slow-rank:1:2", rank, 2, 5, num_chunks=2).factor(task)
    assert slow == (2.0 if rank else 1.0)


def test_tasks_are_seeded_by_the_place_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static schedule gives each stage the same seeds."""
    Connected(monkeypatch, None)
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(dynamic, "TaskRng", lambda *places: given.append(places))
    own: Any = schedule_of()
    own._connect(call_of(), Topology((5, 6, 7), 1, 1), Boundaries(8, (8,), (8,)))
    assert given == [(own._seed, 3, 1)]


def test_nothing_is_launched_ahead_where_that_would_hold_up_what_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected, said = Connected(monkeypatch, None), []
    connected.reason = "one queue"
    own: Any = schedule_of(said)
    session = own._connect(call_of(), Topology((5, 6), 0, 1), Boundaries(8, (8,), (8,)))
    assert not session.launch_ahead
    assert said[1:] == ["dynamic pipeline: no task is launched ahead of its input: one queue"]
