"""The sessions of the dynamic schedule: when links are opened anew, and as what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime import links, session
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.delayed import DelayedTransport
from megatron.dpp.runtime.session import Session, Sessions
from megatron.dpp.runtime.stage_group import StageGroup
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, Memory
from megatron.dpp.transport.base import LinkInfo
from tests.fake_network import FakeNetwork
from tests.runtime.test_dynamic import call_of


def sessions_of(said: list[str] | None = None, seed: int = 1, **config: Any) -> Sessions:
    log = ([] if said is None else said).append
    return Sessions(DppConfig(**config), seed, log, log)


class Opened:
    """Sessions whose links note the length that they have room for, on one member of a stage."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        topology: Topology | None = None,
        member: int | None = None,
        **config: Any,
    ) -> None:
        self.said: list[str] = []
        self.sessions = sessions_of(self.said, **config)
        self.topology = topology or Topology((0, 1), 0, 1)
        self.lengths: list[int] = []
        self.closed: list[str] = []
        self.follow: list[bool] = []
        self.stage_ranks: list[Any] = []
        self.reason: str | None = None
        self.link = LinkInfo(6, "shm", "same host")
        self.board = None if member is None else SimpleNamespace(index=member)
        group = StageGroup((5, 9) if member is not None else ())
        monkeypatch.setattr(session, "pipeline_of", lambda *_: self.topology)
        monkeypatch.setattr(session, "stage_group_of", lambda call: group)
        monkeypatch.setattr(session, "why_not_ahead", lambda *_: self.reason)
        monkeypatch.setattr(session, "replica_of", lambda call: 3)
        monkeypatch.setattr(links, "open_links", self._open)
        monkeypatch.setattr(session, "timer_for", self._timer)

    def _open(self, specs: Any, config: DppConfig, stage_ranks: Any, device: Any) -> Any:
        own = self.topology.ranks[self.topology.rank]
        self.lengths.append(specs[0].slot_bytes)
        self.stage_ranks.append(stage_ranks)
        transport: Any = FakeNetwork(list(specs)).transport(own)
        transport.board = self.board
        transport.links = lambda: [self.link]
        transport.close = lambda: self.closed.append("links")
        return transport

    def _timer(self, *, follow: bool) -> HostTimer:
        self.follow.append(follow)
        timer = HostTimer()
        timer.injected_seconds = 1.5
        return timer

    def call(self, length: int = 8) -> Session:
        given = call_of(
            length=length, longest=lambda most: max(length, most),
            model=[torch.nn.Identity()] * self.topology.num_chunks,
        )  # fmt: skip
        chunks = self.topology.num_chunks
        given.config.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        return self.sessions.open(given)


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
        opened.sessions.open(larger)
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
        opened.sessions.open(given)

    for width in (1, 2, 1, 2):
        call(width)
    assert opened.lengths == [32, 64]


def test_sessions_close_twice_and_keep_what_they_were_delayed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch)
    own = opened.sessions
    assert own.injected_seconds == 0.0 and own.current is None
    first = opened.call(8)
    assert own.current is first
    monkeypatch.setattr(Decisions, "close", lambda self: opened.closed.append("the recording"))
    first.decisions.measured(Memory(activation_bytes=1, deferred_bytes=0))
    assert own.injected_seconds == 1.5
    second = opened.call(9)
    assert second.decisions is first.decisions, "a recording goes on when links are opened anew"
    assert second.decisions.wants_measuring, "longer sequences are measured anew"
    assert own.injected_seconds == 3.0
    for _ in range(2):
        own.close()
        assert own.injected_seconds == 3.0 and own.current is None
    assert opened.closed == ["links", "links", "the recording"]
    assert opened.call(8).decisions is not first.decisions


def test_the_largest_of_a_stage_is_that_of_its_group_on_the_model_s_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def largest(_: StageGroup, *values: float, device: torch.device) -> list[float]:
        asked.append((values, device))
        return [9.0, 8.0]

    monkeypatch.setattr(StageGroup, "largest", largest)
    call = call_of(boundary_example=lambda: torch.zeros(1, device="meta"))
    assert Opened(monkeypatch).call().largest(call, 3.0, 4.0) == [9.0, 8.0]
    assert asked == [((3.0, 4.0), torch.device("meta"))]


@pytest.mark.parametrize(
    ("inject", "late"), [(None, False), ("jitter:0.1", False), ("slow-link:0-1:5ms", True)]
)
def test_links_have_as_many_slots_as_the_config_says_and_are_late_where_it_says_so(
    monkeypatch: pytest.MonkeyPatch, inject: str | None, late: bool
) -> None:
    opened = Opened(monkeypatch, Topology((4, 6), 0, 1), 0, slots=5, inject=inject)
    links = opened.call().links
    assert [spec.depth for spec in links.channels.specs] == [5, 5]
    assert opened.stage_ranks == [(5, 9)]
    assert isinstance(links.transport, DelayedTransport) is late


@pytest.mark.parametrize(("member", "leads"), [(None, True), (0, True), (1, False)])
def test_only_followers_follow_and_leave_the_recording_to_their_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, member: int | None, leads: bool
) -> None:
    record = str(tmp_path / "record")
    opened = Opened(monkeypatch, Topology((5, 6), 0, 1), member, record=record)
    found = opened.call()
    assert opened.stage_ranks == [(5, 9) if member is not None else ()]
    assert opened.follow == [not leads]
    assert opened.said == ["dynamic pipeline: rank 5 -> 6: shm (same host)"]
    assert found.launch_ahead and found.injector is None
    found.decisions.scheduler(Geometry(2, 0, 1, 2), backward=Backward(split=False))
    found.decisions.close()
    names = [path.name for path in tmp_path.iterdir()]
    assert names == (["record.replica3.rank0"] if leads else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_one_of_its_pipeline(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Of every replica, whose ranks have other numbers in the job; draws are those of the seed."""
    inject = "slow-rank:1:2,jitter:0.3"
    found = Opened(monkeypatch, Topology((6, 7), rank, 2), inject=inject, seed=5).call().injector
    assert found is not None
    task = Task(4, "F", 1, 3, 0.0, 0.5)
    assert found.factor(task) == Injector(inject, rank, 2, 5, num_chunks=2).factor(task)
    slow = Injector("slow-rank:1:2", rank, 2, 5, num_chunks=2).factor(task)
    assert slow == (2.0 if rank else 1.0)


def test_nothing_is_launched_ahead_where_that_would_hold_up_what_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened(monkeypatch)
    opened.reason = "one queue"
    assert not opened.call().launch_ahead
    assert opened.said[1:] == [
        "dynamic pipeline: no task is launched ahead of its input: one queue"
    ]
