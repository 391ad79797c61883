"""Several iterations over the same channels, neighbours that are ahead, and complete chunks."""

from __future__ import annotations

import pytest
import torch

from megatron.dpp.runtime.agreement import Decider, decider_for
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.schedule import Action, Geometry, Kind, Scheduler, View
from megatron.dpp.trace import NullRecorder
from tests.fake_network import FakeNetwork
from tests.runtime.pipelines import Arithmetic, run_pipeline
from tests.runtime.test_executor import LAST

GEOMETRY = Geometry(2, 1, 1, 2)
"""The last of two ranks, with one chunk and two microbatches."""


@pytest.mark.parametrize(("p", "v", "members"), [(2, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_evaluations_between_training_steps(p: int, v: int, members: int) -> None:
    """An evaluation sends no gradients, so gradient channels must not count its microbatches."""
    evaluations, m = (1, 3, 4), 4
    runners = run_pipeline(
        p, v, m, iterations=6, evaluations=evaluations, members=members, delay=0.001
    )
    for runner in runners:
        for chunk in range(v):
            for kind, times in (("F", 6), ("B", 3)):
                order = [i for k, c, i, _ in runner.log if k == kind and c == chunk]
                assert order == list(range(m)) * times
        assert runner.complete == list(range(v - 1, -1, -1)) * 3


def test_an_iteration_of_a_neighbour_that_is_ahead_waits_for_its_turn() -> None:
    """Rank 0 has sent all inputs of three iterations before rank 1 begins."""
    specs = LAST.channels([64], [64], 6).specs
    network = FakeNetwork(list(specs))
    first, last = network.transport(0), network.transport(1)
    for iteration in range(3):
        for microbatch in range(2):
            value = torch.tensor([float(10 * iteration + microbatch)])
            first.put(0, value, iteration=iteration, microbatch=microbatch)
    assert list(last.poll()) == [6]
    links, runner = Links(last, LAST.channels([64], [64], 6)), Arithmetic(LAST)
    for iteration in range(3):
        scheduler = Scheduler(GEOMETRY, split_backward=False)
        decider = decider_for(scheduler, links.channels.receiving, None)
        decider.start(links.consumed)
        Executor(
            runner=runner,
            decider=decider,
            links=links,
            recorder=NullRecorder(),
            timer=HostTimer(),
            injector=None,
            iteration=Iteration(split_backward=False, number=iteration, timeout=5.0),
        ).run()
        links.consume(GEOMETRY)
        for microbatch in range(2):
            assert runner.results["F", 0, microbatch] == 2 * (10 * iteration + microbatch) + 1
    assert len(runner.log) == 3 * 4


def new_decider(before: int) -> Decider:
    """The decider of a single rank that has counted so many microbatches in earlier iterations."""
    decider = Decider(Scheduler(GEOMETRY, split_backward=False), [(0, 0)])
    decider.start([before])
    return decider


def test_only_this_iterations_arrivals_count() -> None:
    decider = new_decider(before=4)
    assert decider.next([4]) is None
    assert str(decider.next([5])) == "0F0"
    assert str(decider.next([7])) == "0B0", "one input of the next iteration is here"
    assert [str(decider.next([9])) for _ in range(2)] == ["0F1", "0B1"]
    assert decider.scheduler.done
    assert decider.next([9]) is None


def test_only_this_iterations_messages_are_believed_to_come() -> None:
    decider = new_decider(before=4)
    assert decider.next_coming([4]) is None
    assert str(decider.next_coming([7])) == "0F0"
    assert str(decider.next([4])) == "0B0"
    assert str(decider.next_coming([7])) == "0F1"
    assert str(decider.next([5])) == "0B1"
    assert decider.scheduler.done
    assert decider.next_coming([9]) is None


def test_a_stage_counts_what_its_last_member_has_of_this_iteration() -> None:
    network = FakeNetwork(list(LAST.channels([64], [64], 2).specs))
    boards = [network.transport(r, board_ranks=[1, 0], board_counters=2).board for r in (1, 0)]
    leader, follower = (
        decider_for(Scheduler(GEOMETRY, split_backward=False), [(0, 0)], board) for board in boards
    )
    for member in (leader, follower):
        member.start([4])
    assert leader.next([7]) is None, "the other member has told of nothing"
    assert follower.next([4]) is None
    assert leader.next([7]) is None
    assert follower.next([5]) is None
    assert str(leader.next([7])) == "0F0"
    assert str(follower.next([5])) == "0F0"
    assert str(leader.next([7])) == str(follower.next([5])) == "0B0"
    assert leader.next([7]) is None
    assert follower.next([8]) is None
    for task in ("0F1", "0B1"):
        assert str(leader.next([8])) == str(follower.next([8])) == task
    assert leader.scheduler.done and follower.scheduler.done


def weights_last(view: View) -> Action | None:
    """Deferred weight gradients when all else has run, so that a chunk without any is early."""
    return view.first_backward() or view.first_forward() or late_weight(view)


def late_weight(view: View) -> Action | None:
    done = view.geometry.num_microbatches * view.geometry.num_chunks
    return view.weight() if sum(view.backwards_run) == done else None


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


def test_an_evaluation_completes_no_chunk() -> None:
    for runner in run_pipeline(2, 2, 3, forward_only=True):
        assert not runner.complete
        assert {Kind[kind] for kind, *_ in runner.log} == {Kind.F}
