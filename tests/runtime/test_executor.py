"""The executor over the fake network: any timing and policy, one order per chunk, right values."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Mail, Tensors
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Action, Geometry, Kind, Scheduler, View
from megatron.dpp.trace import NullRecorder
from tests.fake_network import FakeTransport
from tests.runtime.pipelines import (
    LAST,
    Arithmetic,
    check_values,
    network_of,
    put,
    rank_of,
    run_pipeline,
)

GEOMETRY = Geometry(2, 1, 1, 2)
"""The last of two ranks, with one chunk and two microbatches."""


LENGTHS = [1, 9, 2, 16, 3, 3, 12, 1, 5, 2] * 6
BOUNDARIES = [[4], [4, 64], [16], [8, 8, 120]]
"""Bytes of each tensor that the ranks of a pipeline send."""


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 9)),
    members=st.sampled_from([1, 1, 1, 2]),
    evaluations=st.sampled_from([(), (), (1,), (0, 2)]),
    settings=st.fixed_dictionaries(
        {
            "split": st.booleans(),
            "policy": st.sampled_from(["dynamic", "depth-first", "megatron"]),
            "cap": st.sampled_from(["auto", "strict", "megatron"]),
            "ahead": st.booleans(),
            "seed": st.integers(0, 1 << 20),
        }
    ),
    content=st.sampled_from(["one", "three", "unlike", "lengths"]),
)
def test_any_timing_gives_the_same_values(
    shape: tuple[int, int, int], members: int, evaluations: tuple[int, ...],
    settings: dict[str, Any], content: str,
) -> None:  # fmt: skip
    """With one tensor per boundary, three, or of unlike number and sizes, or unlike microbatches.
    Neighbours may be an iteration ahead, in training steps or evaluations.
    """
    p, v, m = shape
    v = v if p > 1 else 1
    more: dict[str, Any] = {
        "one": {}, "three": {"tensors": 3}, "unlike": {"sizes": BOUNDARIES[-p:]},
        "lengths": {"lengths": LENGTHS[:m]},
    }[content]  # fmt: skip
    iterations = 1 + max(evaluations, default=0)
    runners = run_pipeline(
        p, v, m, delay=0.002, members=members, iterations=iterations, evaluations=evaluations,
        **settings, **more,
    )  # fmt: skip
    trained = iterations - len(evaluations)
    check_values(runners, m, iterations, trained=trained)
    for place, runner in enumerate(runners):
        assert runner.log == runners[place - place % members].log, "members run one order"
        assert runner.complete == list(range(v - 1, -1, -1)) * trained, "reduced as v-1..0"
        for chunk in range(v):
            order = [(i, q) for k, c, i, q in runner.log if k == "W" and c == chunk]
            assert (
                order == [(i, q) for i in range(m) for q in range(2)] * settings["split"] * trained
            )


@pytest.mark.parametrize("members", [1, 2])
def test_a_w_is_decided_once_and_run_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Members that only follow decide nothing, and ask no timer when to."""
    decided, asked = list[Action | None](), set[int]()
    for name, answer in (("pause", 0.0), ("goes_on", True)):
        told = lambda *_, answer=answer: (asked.add(threading.get_ident()), answer)[1]  # noqa: E731
        monkeypatch.setattr(TaskTimer, name, told)
    decide = Scheduler.next
    monkeypatch.setattr(Scheduler, "next", lambda own: decided.append(decide(own)) or decided[-1])
    for runner in run_pipeline(2, 1, 8, members=members, pieces=(5,)):
        order = [(i, q) for k, _, i, q in runner.log if k == "W"]
        assert order == [(i, q) for i in range(8) for q in range(5)]
    assert sum(action is not None and action.kind == Kind.W for action in decided) < 2 * 8 * 5 / 2
    assert len(asked) == 2


@pytest.mark.parametrize("late", [False, True])
def test_what_arrives_within_a_w_comes_before_its_next_piece(late: bool) -> None:
    """A last rank, whose next input comes while the second of three pieces runs."""
    network = network_of(LAST)
    put(network, 1)

    class Sending(Arithmetic):
        def weight(self, chunk: int, microbatch: int, piece: int) -> None:
            super().weight(chunk, microbatch, piece)
            if (microbatch, piece) == (0, 1 if late else 0):
                network.transport(0).put(0, torch.zeros(1), iteration=0, microbatch=1)

    runner = Sending(LAST)
    geometry = Geometry(2, 1, 1, 2, w_pieces=(3,))
    rank_of(network, geometry, runner=runner, split_backward=True).run()
    order = [f"{k}{i}{q}" for k, _, i, q in runner.log]
    before = ["F00", "B00", "W00"] + ["W01"] * late
    after = ["F10", "B10"] + ["W01"] * (not late) + ["W02", "W10", "W11", "W12"]
    assert order == before + after


def weights_last(view: View) -> Action | None:
    """Deferred weight gradients when all else has run, so that a chunk without any is early."""
    done = view.geometry.num_microbatches * view.geometry.num_chunks
    late = view.weight() if sum(view.backwards_run) == done else None
    return view.first_backward() or view.first_forward() or late


@pytest.mark.parametrize("policy", ["dynamic", f"{__name__}:weights_last"])
@pytest.mark.parametrize("pieces", [(0, 2), (2, 0), (0, 0), (1, 3, 0)])
def test_chunks_with_nothing_to_defer_complete_with_their_last_backward(
    pieces: tuple[int, ...], policy: str
) -> None:
    """In the order v-1..0, each as soon as it and those before it have all of their gradients."""
    v, m = len(pieces), 4
    for runner in run_pipeline(2, v, m, pieces=pieces, policy=policy, cap="8p"):
        ends = []
        for chunk in range(v):
            kinds = [k for k, c, _, _ in runner.log if c == chunk]
            assert kinds.count("W") == m * pieces[chunk]
            ends.append(max(n for n, task in enumerate(runner.log) if task[1] == chunk) + 1)
        assert runner.complete == list(range(v - 1, -1, -1))
        assert runner.complete_after == [max(ends[chunk:]) for chunk in range(v - 1, -1, -1)]


# Arrivals ----------------------------------------------------------------------------------------


def links_of(receiving: list[tuple[int, int]], before: int = 0) -> Any:
    return SimpleNamespace(receiving=receiving, consumed=[before] * len(receiving))


def new_decider(before: int) -> Decider:
    """The decider of a single rank that has counted so many microbatches in earlier iterations."""
    return Decider(Scheduler(GEOMETRY, split_backward=False), links_of([(0, 0)], before))


def test_only_this_iterations_arrivals_count_and_are_believed_to_come() -> None:
    decider = new_decider(before=4)
    assert decider.next([4]) is None
    assert str(decider.next([5])) == "0F0"
    assert str(decider.next([7])) == "0B0", "one input of the next iteration is here"
    assert [str(decider.next([9])) for _ in range(2)] == ["0F1", "0B1"]
    assert decider.scheduler.done and decider.next([9]) is None
    coming = new_decider(before=4)
    assert coming.next_coming([4]) is None
    assert str(coming.next_coming([7])) == "0F0"
    assert str(coming.next([4])) == "0B0"
    assert str(coming.next_coming([7])) == "0F1"
    assert str(coming.next([5])) == "0B1"
    assert coming.scheduler.done and coming.next_coming([9]) is None


def test_one_coming_message_is_believed_and_gradients_come_first() -> None:
    receiving = [(0, 1), (1, 0), (1, 1)]
    decider = Decider(Scheduler(Geometry(2, 0, 2, 2), cap=8), links_of(receiving))
    index = {channel: place for place, channel in enumerate(receiving)}
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
    fixed = Scheduler(Geometry(2, 0, 2, 4), policy="megatron", cap=8, split_backward=False)
    decider, arrived = Decider(fixed, links_of(receiving)), [2, 0, 2]
    while decider.next(arrived):
        pass
    assert str(decider.next_coming([3, 1, 2])) == "1F2", "and no gradient where the order is fixed"


@pytest.mark.parametrize(("consumed", "ahead"), [(4, False), (5, True)])
def test_an_input_is_ahead_of_its_task_in_later_iterations_too(
    monkeypatch: pytest.MonkeyPatch, consumed: int, ahead: bool
) -> None:
    """The count of arrivals is compared with all messages that earlier iterations took."""
    links = Links(network_of(LAST).transport(1), LAST)
    links.consumed = [consumed]
    monkeypatch.setattr(links.transport, "poll", lambda: [5])
    mail = Mail(links, NullRecorder(), 0, 20.0)
    mail.poll()
    assert mail.is_ahead(0) == ahead


# Channels ----------------------------------------------------------------------------------------


def test_both_ends_of_a_boundary_mean_the_same_channels() -> None:
    sends = [(4, 64), (16,), (8, 8, 120)]
    ends = [Topology((5, 6, 7), r, 2).channels(sends[r - 1], sends[r], 3) for r in range(3)]
    for rank, channels in enumerate(ends):
        for other, specs in enumerate(ends):
            if rank != other:
                ids = {5 + rank, 5 + other}
                shared = {s for s in channels if {s.source, s.destination} == ids}
                assert shared == {s for s in specs if {s.source, s.destination} == ids} != set()
        for spec in channels:
            tensors = sends[min(spec.source, spec.destination) - 5]
            if {spec.source, spec.destination} == {5, 7}:
                tensors = sends[2]
            assert (spec.slot_bytes, spec.depth) == (max(tensors), 3 * len(tensors))


def test_one_stage_has_no_neighbour() -> None:
    assert not Topology((3,), 0, 1).channels([4], [8], 2)


# Evaluations and lengths -------------------------------------------------------------------------


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The messages that wait to leave behind each put, and their bytes."""
    found: list[tuple[int, int]] = []
    send = FakeTransport.put

    def watched(own: FakeTransport, *given: Any, **options: Any) -> None:
        send(own, *given, **options)
        found.append((own.pending(), own.pending_bytes()))

    monkeypatch.setattr(FakeTransport, "put", watched)
    return found


EVALUATES: dict[str, Any] = {"policy": "depth-first", "split": False, "forward_only": True}


@pytest.mark.parametrize(("p", "v", "members"), [(3, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_an_evaluation_keeps_few_outputs(
    pending: list[tuple[int, int]], p: int, v: int, members: int
) -> None:
    """A first stage that is faster than the last must not keep the outputs of all microbatches."""
    runners = run_pipeline(p, v, 60, late=0.002, members=members, **EVALUATES)
    assert all(len(runner.log) == 60 * v for runner in runners)
    # Where there are several chunks, what the others have under way may come round meanwhile.
    assert max(n for n, _ in pending) <= (8 + 1 if v == 1 else p * (8 + 1) + v) < 60


def test_an_evaluation_is_bounded_by_tokens(
    pending: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short outputs may wait, or few long ones, and one message always."""
    monkeypatch.setattr("megatron.dpp.runtime.mail.MOST_PENDING", 4)
    run_pipeline(2, 1, 60, late=0.003, lengths=LENGTHS, **EVALUATES)
    largest_mean = max(sum(LENGTHS[:n]) / n for n in range(1, 61))
    assert max(number for number, _ in pending) > 4 + 1
    assert max(size for _, size in pending) <= 4 * (4 * largest_mean + max(LENGTHS))


# Memory that is freed, or overwritten by a later task ------------------------------------------

NAN = float("nan")


@dataclass
class Freed(Arithmetic):
    """An output's storage is replaced when it is freed, as megatron-core does."""

    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        output = super().forward(chunk, microbatch, received)
        assert isinstance(output, torch.Tensor)
        self.outputs[chunk, microbatch] = output
        return output

    def free_output(self, chunk: int, microbatch: int) -> None:
        self.outputs.pop((chunk, microbatch)).data = torch.full((2,), NAN)


@dataclass
class Strided(Freed):
    """Results are every second element of a buffer."""

    def spread(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        buffer = torch.full((2, 2), NAN)
        buffer[:, 0] = tensor
        assert not buffer[:, 0].is_contiguous()
        return buffer[:, 0]


@pytest.mark.parametrize("kind", [Freed, Strided])
def test_outputs_are_freed_once_they_are_put_and_may_lie_in_strides(kind: type[Freed]) -> None:
    runners = run_pipeline(3, 2, 5, delay=0.002, sizes=[[8]] * 3, iterations=2, kind=kind)
    check_values(runners, 5, iterations=2)
    for runner in runners:
        last = runner.topology.stage(1) == 5
        assert set(runner.outputs) == ({(1, i) for i in range(5)} if last else set())


@dataclass
class Slots(Arithmetic):
    """Works in slots, as CUDA graphs do: an activation's input and output lie in the buffers of its
    slot from its F to its last W, and then in those of another. Every B writes to one place, whose
    content is copied for the neighbour.
    """

    pieces: int = 2
    """W tasks of an activation; without them a slot is free after B."""
    free: list[torch.Tensor] = field(default_factory=list)
    held: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor = field(default_factory=lambda: torch.full((2,), NAN))
    num_slots: int = 0

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        if not self.free:
            self.free.append(torch.full((2, 2), NAN))
            self.num_slots += 1
        slot = self.held[chunk, microbatch] = self.free.pop()
        if received is not None:
            assert isinstance(received, torch.Tensor)
            slot[0].copy_(received)
            received = slot[0]
        slot[1].copy_(super().forward(chunk, microbatch, received))  # type: ignore[arg-type]
        return slot[1]

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None:
        found = super().backward(chunk, microbatch, received)
        self._work_on(chunk, microbatch, last=not self.pieces)
        if found is None:
            return None
        assert isinstance(found, torch.Tensor)
        return self.gradient.copy_(found).clone()

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        super().weight(chunk, microbatch, piece)
        self._work_on(chunk, microbatch, last=piece == self.pieces - 1)

    def _work_on(self, chunk: int, microbatch: int, *, last: bool) -> None:
        slot = self.held[chunk, microbatch]
        assert slot[1, 0].item() == self.results["F", chunk, microbatch], "it is this activation's"
        if last:
            self.free.append(self.held.pop((chunk, microbatch)).fill_(NAN))


@dataclass
class Fused(Slots):
    """With a fused backward."""

    pieces: int = 0


@pytest.mark.parametrize("policy", ["dynamic", "depth-first", "megatron"])
@pytest.mark.parametrize("kind", [Slots, Fused])
def test_a_slot_is_used_again_once_nothing_in_it_is_needed(kind: type[Slots], policy: str) -> None:
    """By then its output has arrived, and its input is no longer read."""
    runners = run_pipeline(
        3, 2, 8, delay=0.002, sizes=[[8]] * 3, iterations=2, policy=policy, split=kind is Slots,
        kind=kind,
    )  # fmt: skip
    check_values(runners, 8, iterations=2)
    for runner in runners:
        assert not runner.held and runner.num_slots < 2 * 8, "slots are used again"
