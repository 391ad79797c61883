"""The executor over the fake network: any timing and policy, one order per chunk, right values."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.core.boundary import boundaries
from megatron.dpp.errors import ConfigError, PeerDead, TransferTimeout
from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Mail
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Action, Geometry, Kind, Scheduler, View
from megatron.dpp.trace import NullRecorder
from tests.fake_network import FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import Arithmetic, StartsLater, check_values, run_pipeline


@settings(max_examples=25)
@given(
    p=st.integers(1, 4),
    v=st.sampled_from([1, 2, 3]),
    m=st.integers(1, 9),
    split=st.booleans(),
    policy=st.sampled_from(["dynamic", "depth-first", "megatron"]),
    cap=st.sampled_from(["auto", "strict", "megatron"]),
    tensors=st.sampled_from([1, 1, 2, 3]),
    ahead=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_timing_gives_the_same_values(
    p: int, v: int, m: int, split: bool, policy: str, cap: str, tensors: int, ahead: bool, seed: int
) -> None:
    if p == 1:
        v = 1
    runners = run_pipeline(
        p, v, m, policy=policy, cap=cap, split=split, delay=0.002, seed=seed, tensors=tensors,
        ahead=ahead,
    )  # fmt: skip
    check_values(runners, m)
    for runner in runners:
        assert runner.complete == list(range(v - 1, -1, -1)), "gradients are reduced as v-1..0"


def test_neighbour_may_be_an_iteration_ahead() -> None:
    runners = run_pipeline(3, 2, 4, iterations=3, delay=0.001)
    check_values(runners, 4, iterations=3)


def test_weight_gradients_run_in_microbatch_order_piece_by_piece() -> None:
    for runner in run_pipeline(2, 2, 6, delay=0.001):
        for chunk in range(2):
            order = [(i, q) for k, c, i, q in runner.log if k == "W" and c == chunk]
            assert order == [(i, q) for i in range(6) for q in range(2)]


@pytest.mark.parametrize("members", [1, 2])
def test_a_w_is_decided_once_and_run_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Also by the members of a stage, which run one order."""
    decided: list[Action | None] = []
    decide = Scheduler.next
    monkeypatch.setattr(Scheduler, "next", lambda own: decided.append(decide(own)) or decided[-1])
    runners = run_pipeline(2, 1, 8, members=members, pieces=(5,))
    check_values(runners, 8)
    for runner in runners:
        order = [(i, q) for k, _, i, q in runner.log if k == "W"]
        assert order == [(i, q) for i in range(8) for q in range(5)]
    # Members that only follow decide nothing.
    assert sum(action is not None and action.kind == Kind.W for action in decided) < 2 * 8 * 5 / 2


@pytest.mark.parametrize("late", [False, True])
def test_what_arrives_within_a_w_comes_before_its_next_piece(late: bool) -> None:
    """A last rank, whose next input comes while the second of three pieces runs."""
    geometry = Geometry(2, 1, 1, 2, w_pieces=(3,))
    channels = LAST.channels([64], [64], 2)
    network = FakeNetwork(list(channels.specs))
    sender = network.transport(0)
    sender.put(0, torch.zeros(16), iteration=0, microbatch=0)

    class Sending(Arithmetic):
        def weight(self, chunk: int, microbatch: int, piece: int) -> None:
            super().weight(chunk, microbatch, piece)
            if (microbatch, piece) == (0, 1 if late else 0):
                sender.put(0, torch.zeros(16), iteration=0, microbatch=1)

    links = Links(network.transport(1), channels)
    runner = Sending(LAST, (64,), (64,))
    scheduler = Scheduler(geometry, cap=4)
    Executor(
        runner=runner,
        decider=decider_for(scheduler, channels.receiving, None),
        links=links,
        recorder=NullRecorder(),
        timer=HostTimer(),
        injector=None,
        iteration=Iteration(split_backward=True, number=0, timeout=20.0),
    ).run()
    order = [f"{k}{i}{q}" for k, _, i, q in runner.log]
    before = ["F00", "B00", "W00"] + ["W01"] * late
    after = ["F10", "B10"] + ["W01"] * (not late) + ["W02", "W10", "W11", "W12"]
    assert order == before + after


def test_members_of_a_stage_run_the_same_order() -> None:
    runners = run_pipeline(3, 2, 6, members=2, delay=0.003, seed=5)
    check_values(runners, 6)
    for leader, follower in zip(runners[::2], runners[1::2], strict=True):
        assert leader.log == follower.log


FIRST = Topology((0, 1), 0, 1)
"""The first of two ranks."""

LAST = Topology((0, 1), 1, 1)
"""The second of two ranks."""


def last_rank(
    network: FakeNetwork, scheduler: Scheduler, timer: HostTimer, timeout: float
) -> Executor:
    """The executor of the last rank alone."""
    channels = LAST.channels([64], [64], 2)
    links = Links(network.transport(1), channels)
    return Executor(
        runner=Arithmetic(LAST),
        decider=decider_for(scheduler, channels.receiving, None),
        links=links,
        recorder=NullRecorder(),
        timer=timer,
        injector=None,
        iteration=Iteration(split_backward=False, number=0, timeout=timeout),
    )


def test_a_peer_that_left_is_named_at_once() -> None:
    """The rank does not wait until --dpp-timeout."""
    network = FakeNetwork(list(LAST.channels([64], [64], 2).specs))
    network.transport(0).close()
    scheduler = Scheduler(Geometry(2, 1, 1, 2), split_backward=False)
    with pytest.raises(PeerDead, match="rank 0 has closed its transport"):
        last_rank(network, scheduler, HostTimer(), timeout=600.0).run()


def test_missing_message_ends_in_a_named_timeout() -> None:
    topology = Topology((0, 1), 1, 1)
    specs = list(topology.channels([64], [64], 2).specs)
    network = FakeNetwork(specs)
    forward = next(spec for spec in specs if spec.destination == 1)
    network.stall(forward)
    with pytest.raises(TransferTimeout, match=r"forward of chunk 0, rank 0 -> 1"):
        run_pipeline(2, 1, 2, network=network, timeout=0.3)


@pytest.mark.parametrize(("p", "v", "members"), [(3, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_an_evaluation_keeps_few_outputs(
    monkeypatch: pytest.MonkeyPatch, p: int, v: int, members: int
) -> None:
    """A first stage that is faster than the last must not keep the outputs of all microbatches."""
    pending: list[int] = []
    put = FakeTransport.put

    def watched(own: FakeTransport, *given: Any, **options: Any) -> None:
        put(own, *given, **options)
        pending.append(own.pending())

    monkeypatch.setattr(FakeTransport, "put", watched)
    runners = run_pipeline(
        p, v, 60, policy="depth-first", split=False, forward_only=True, late=0.002, members=members
    )
    assert all(len(runner.log) == 60 * v for runner in runners)
    # Where there are several chunks, what the others have under way may come round meanwhile.
    assert max(pending) <= (8 + 1 if v == 1 else p * (8 + 1) + v) < 60


@pytest.mark.parametrize("policy", ["dynamic", "megatron"])
def test_a_first_rank_notices_that_its_receiver_left(policy: str) -> None:
    """Also with Megatron's order, where a forward may run but the next task is a backward."""
    channels = FIRST.channels([64], [64], 2)
    network = FakeNetwork(list(channels.specs))
    network.transport(1).close()
    links = Links(network.transport(0), channels)
    scheduler = Scheduler(Geometry(2, 0, 1, 8), policy=policy, split_backward=False)
    executor = Executor(
        runner=Arithmetic(FIRST),
        decider=decider_for(scheduler, channels.receiving, None),
        links=links,
        recorder=NullRecorder(),
        timer=HostTimer(),
        injector=None,
        iteration=Iteration(split_backward=False, number=0, timeout=60.0),
    )
    with pytest.raises(PeerDead, match="rank 1 has closed its transport"):
        executor.run()


def test_policies_that_wait_for_each_other_are_named() -> None:
    """Rank 1 runs no backward, and waits for the input that rank 0 sends after its gradient."""
    timid = Scheduler(Geometry(2, 1, 1, 2), policy=_forwards_alone, split_backward=False)
    with pytest.raises(TransferTimeout, match=r"or the policy waits for messages"):
        last_rank(on_its_way(0.0), timid, HostTimer(), timeout=0.05).run()
    assert timid.held == 1.0


def _forwards_alone(view: View) -> Action | None:
    return view.first_forward()


def test_members_of_a_stage_agree_on_whole_boundaries() -> None:
    """An arrival counts when all members have all tensors of it."""
    runners = run_pipeline(2, 2, 6, members=2, delay=0.003, seed=9, tensors=3, iterations=2)
    check_values(runners, 6, iterations=2)


@pytest.mark.parametrize(("p", "v", "members"), [(2, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_each_boundary_has_tensors_of_its_own(p: int, v: int, members: int) -> None:
    """A rank receives another number of tensors than it sends, with other sizes."""
    sizes = [[4, 64], [16], [8, 8, 120]][-p:]
    runners = run_pipeline(p, v, 4, delay=0.002, sizes=sizes, members=members, iterations=2)
    check_values(runners, 4, iterations=2)


def test_both_ends_of_a_boundary_mean_the_same_channels() -> None:
    sends = [(4, 64), (16,), (8, 8, 120)]
    ends = [Topology((5, 6, 7), r, 2).channels(sends[r - 1], sends[r], 3) for r in range(3)]
    for rank, channels in enumerate(ends):
        for other, specs in enumerate(end.specs for end in ends):
            if rank != other:
                ids = {5 + rank, 5 + other}
                shared = {s for s in channels.specs if {s.source, s.destination} == ids}
                assert shared == {s for s in specs if {s.source, s.destination} == ids} != set()
        for spec in channels.specs:
            tensors = sends[min(spec.source, spec.destination) - 5]
            if {spec.source, spec.destination} == {5, 7}:
                tensors = sends[2]
            assert (spec.slot_bytes, spec.depth) == (max(tensors), 3 * len(tensors))


def test_a_rank_that_is_its_own_neighbour_sends_what_it_would_receive() -> None:
    assert not Topology((3,), 0, 1).channels([4], [8], 2).specs, "one stage has no neighbour"
    assert len(Topology((3,), 0, 2).channels([4], [4], 2).specs) == 2
    with pytest.raises(ConfigError, match=r"rank 3 is its own .* \(8,\) bytes and would receive"):
        Topology((3,), 0, 2).channels([4], [8], 2)


def test_an_undeclared_tensor_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arithmetic, "spread", lambda _, tensor, sizes: [tensor, tensor])
    scheduler = Scheduler(Geometry(2, 1, 1, 2), split_backward=False)
    with pytest.raises(TypeError, match="returned Tensor, Tensor to its neighbour; 1 Tensor decl"):
        last_rank(on_its_way(0.0), scheduler, HostTimer(), timeout=20.0).run()


def test_shapes_that_are_no_shapes_are_refused() -> None:
    assert boundaries((4, 2, 8), 2, None) == (128, (128,), (128,))
    both = boundaries((4, 2, 8), 2, lambda r, s: (r, [*s, (3,)]))
    assert both == (128, (128,), (128, 6))
    assert both.several
    for adjust in (lambda r, s: None, lambda r, s: ([], s), lambda r, s: ([("x",)], s)):
        with pytest.raises(ConfigError, match="adjust_tensor_shapes_fn returned"):
            boundaries((4, 2, 8), 2, adjust)
    both.check_fits(both)
    with pytest.raises(ConfigError, match=r"would send 1 tensors of up to 128 bytes .* 2 of up"):
        boundaries((4, 2, 8), 2, None).check_fits(both)


def test_one_coming_message_is_believed_and_gradients_come_first() -> None:
    channels = Topology((0, 1), 0, 2).channels([64], [64], 2)
    Links(FakeNetwork(list(channels.specs)).transport(0), channels)
    scheduler = Scheduler(Geometry(2, 0, 2, 2), cap=8)
    decider = decider_for(scheduler, channels.receiving, None)
    index = {channel: place for place, channel in enumerate(channels.receiving)}
    nothing, coming = [0] * len(index), [0] * len(index)
    while decider.next(nothing):
        pass
    assert decider.next_coming([]) is None and decider.next_coming(coming) is None
    coming[index[0, 1]] = 2
    assert str(decider.next_coming(coming)) == "1F0"
    assert decider.next(nothing) is None, "the second input is not here"
    coming[index[1, 1]] = 1
    assert str(decider.next_coming(coming)) == "1B0"
    assert decider.next_coming(nothing) is None


class Busy(HostTimer):
    """A device that is busy for 30 ms and then has the input of a task that was launched ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._free_at = time.monotonic() + 0.03
        self.looks = 0

    def pause(self) -> float:
        self.looks += 1
        return max(0.0, self._free_at - time.monotonic())

    def begin(self, *, ahead: bool = False) -> None:
        super().begin(ahead=ahead)
        self._free_at = time.monotonic() + 0.03

    def waiting(self) -> bool:
        return self.pause() > 0.0


def test_a_busy_device_leaves_the_interpreter_to_other_threads() -> None:
    """A loop that polls without sleeping keeps the GIL from a data loader's thread."""
    scheduler, timer = Scheduler(Geometry(2, 1, 1, 1, forward_only=True)), Busy()
    last_rank(on_its_way(0.0), scheduler, timer, timeout=20.0).run()
    assert scheduler.done
    assert timer.looks < 2 * 30 / 0.05, "it looks every 50 us at most"


class NeverStarts(HostTimer):
    """A device that never gets the input of the task that was launched ahead."""

    def waiting(self) -> bool:
        return True


def on_its_way(seconds: float, **more: Any) -> FakeNetwork:
    """A network with the last rank's first input."""
    specs = list(LAST.channels([64], [64], 2).specs)
    network = FakeNetwork(specs, delay=lambda *_: seconds, ahead=True, **more)
    network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=0)
    return network


@pytest.mark.parametrize(("consumed", "ahead"), [(4, False), (5, True)])
def test_an_input_is_ahead_of_its_task_in_later_iterations_too(
    monkeypatch: pytest.MonkeyPatch, consumed: int, ahead: bool
) -> None:
    """The count of arrivals is compared with all messages that earlier iterations took."""
    channels = LAST.channels([64], [64], 2)
    links = Links(FakeNetwork(list(channels.specs)).transport(1), channels)
    links.consumed = [consumed]
    monkeypatch.setattr(links.transport, "poll", lambda: [5])
    mail = Mail(links, NullRecorder(), 0, 20.0)
    mail.poll()
    assert mail.is_ahead(0) == ahead


def test_a_device_that_waits_is_not_waited_for_longer_than_the_timeout(clock: VirtualClock) -> None:
    """Also when the iteration has no other task left."""
    scheduler = Scheduler(Geometry(2, 1, 1, 1, forward_only=True))
    network = on_its_way(0.2, clock=clock, stepping=True)
    executor = last_rank(network, scheduler, NeverStarts(), timeout=0.5)
    with pytest.raises(TransferTimeout, match=r"microbatch 0 of iteration 0 .*rank 0 -> 1"):
        executor.run()
    assert scheduler.done


def test_the_deadline_counts_from_when_the_device_began_to_wait() -> None:
    """The wait of a task without a gap before it starts now, not at the clock's zero."""
    scheduler = Scheduler(Geometry(2, 1, 1, 1, forward_only=True))
    channels = LAST.channels([64], [64], 2)
    links = Links(on_its_way(0.05).transport(1), channels)
    decider: Any = decider_for(scheduler, channels.receiving, None)
    decider.next = lambda arrived: type(decider).next_coming(decider, [1])
    timer = StartsLater()
    Executor(
        runner=Arithmetic(LAST),
        decider=decider,
        links=links,
        recorder=NullRecorder(),
        timer=timer,
        injector=None,
        iteration=Iteration(split_backward=False, number=0, timeout=100.0),
    ).run()
    assert not timer.waiting(), "it was waited for"
