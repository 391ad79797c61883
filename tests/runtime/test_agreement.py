"""The members of a stage run one order, however late their messages, hosts and they themselves are.

Each task but W waits for all members, as a collective in it would. A generator decides who moves
next: a member, a message, or a note between two hosts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.direction import Direction
from megatron.dpp.runtime.agreement import Decider, decider_for
from megatron.dpp.schedule import (
    DIRECTION_OF,
    Action,
    Geometry,
    Kind,
    Replay,
    Scheduler,
    parse_cap,
)
from megatron.dpp.transport.base import Board


class Stage:
    """The boards of one stage's members. Members on one host share memory; between the leader's
    host and another, notes travel in order until :meth:`deliver` lets one arrive.
    """

    def __init__(self, hosts: Sequence[int], num_counters: int) -> None:
        self.hosts = hosts
        self.posted = [[0] * num_counters for _ in hosts]
        self.known = {host: [0] * num_counters for host in hosts}
        self.words: dict[int, list[int]] = {host: [] for host in hosts}
        self.up: dict[int, deque[list[int]]] = {h: deque() for h in hosts if h != hosts[0]}
        self.down: dict[int, deque[int]] = {h: deque() for h in self.up}

    def common_of(self, host: int) -> list[int]:
        own = [line for line, where in zip(self.posted, self.hosts, strict=True) if where == host]
        return [min(column) for column in zip(*own, strict=True)]

    def deliver(self, chance: random.Random) -> bool:
        """Let one note arrive; False if none is under way."""
        ups = [h for h, notes in self.up.items() if notes]
        downs = [h for h, words in self.down.items() if words]
        if not ups + downs:
            return False
        if ups and (not downs or chance.random() < 0.5):
            host = chance.choice(ups)
            self.known[host] = self.up[host].popleft()
        else:
            host = chance.choice(downs)
            self.words[host].append(self.down[host].popleft())
        return True


class HostedBoard(Board):
    """One member's board of a :class:`Stage`."""

    def __init__(self, stage: Stage, index: int) -> None:
        self.index, self.size = index, len(stage.hosts)
        self.spans_hosts = len(set(stage.hosts)) > 1
        self._stage, self._host, self._read = stage, stage.hosts[index], 0

    def post(self, counters: Sequence[int]) -> None:
        before = self._stage.posted[self.index]
        assert all(new >= old for new, old in zip(counters, before, strict=True)), "they only grow"
        self._stage.posted[self.index] = list(counters)
        if self._host in self._stage.up:
            self._stage.up[self._host].append(self._stage.common_of(self._host))

    def common(self) -> Sequence[int]:
        known = [self._stage.known[host] for host in self._stage.up]
        lines = [self._stage.common_of(self._host), *known]
        return [min(column) for column in zip(*lines, strict=True)]

    def append(self, word: int) -> None:
        self._stage.words[self._host].append(word)
        for notes in self._stage.down.values():
            notes.append(word)

    def next(self) -> int | None:
        words = self._stage.words[self._host]
        if self._read == len(words):
            return None
        self._read += 1
        return words[self._read - 1]


class Rank:
    """One member of a stage: its decider, what has arrived, and the tasks that it began."""

    def __init__(self, geometry: Geometry, policy: str, boards: Stage | None, index: int) -> None:
        self.channels = channels_of(geometry)
        self.sent = dict.fromkeys(self.channels, 0)
        self.arrived = dict.fromkeys(self.channels, 0)
        cap = parse_cap("auto", geometry).chunks
        scheduler = Scheduler(geometry, policy=policy, cap=cap, split_backward=True)
        board = None if boards is None else HostedBoard(boards, index)
        self.decider = decider_for(scheduler, links_of(geometry, board))
        self.began: list[Action] = []
        self.collectives: list[Action] = []
        """Those that meet the other members."""
        self.num_ended = 0

    @property
    def done(self) -> bool:
        return self.decider.done and self.num_ended == len(self.began)

    def deliver(self, chance: random.Random) -> bool:
        """Let one message arrive; False if none is under way."""
        coming = [c for c in self.channels if self.arrived[c] < self.sent[c]]
        if coming:
            self.arrived[chance.choice(coming)] += 1
        return bool(coming)

    def choose(self, *, ahead: bool) -> Action | None:
        """The next task, as the executor asks for it; ``ahead``: its input may be in flight."""
        arrived = [self.arrived[c] for c in self.channels]
        if self.began and self.began[-1].kind == Kind.W:
            action = self.decider.run_on(arrived)
            if action is not None:
                return action
        action = self.decider.next(arrived)
        if action is None and ahead:
            action = self.decider.next_coming([self.sent[c] for c in self.channels])
        if action is not None:
            self.decider.look_ahead()
        return action

    def has_input(self, action: Action) -> bool:
        """The input of a task that was begun has arrived, so that the device can run it."""
        channel = (DIRECTION_OF.get(action.kind, Direction.FORWARD), action.chunk)
        needs = action.kind in DIRECTION_OF and channel in self.arrived
        return not needs or self.arrived[channel] > action.microbatch


def channels_of(geometry: Geometry) -> list[tuple[int, int]]:
    """The incoming channels of a stage, as (direction, chunk)."""
    stages = [chunk * geometry.num_ranks + geometry.rank for chunk in range(geometry.num_chunks)]
    last = geometry.num_ranks * geometry.num_chunks - 1
    inputs = [(Direction.FORWARD, c) for c, stage in enumerate(stages) if stage > 0]
    return inputs + [(Direction.BACKWARD, c) for c, stage in enumerate(stages) if stage < last]


def links_of(geometry: Geometry, board: Board | None, before: int = 0) -> Any:
    """Channels behind so many messages of each."""
    channels = channels_of(geometry)
    return SimpleNamespace(
        receiving=channels, consumed=[before] * len(channels),
        transport=SimpleNamespace(board=board),
    )  # fmt: skip


class Job:
    """``members`` pipelines of ``p`` ranks; the ranks of a stage share collectives.

    Args:
        hosts: the host of each member, the same in every stage; None for members that do not agree.
        ahead: tasks may be launched before their input has arrived.
    """

    def __init__(
        self, p: int, v: int, m: int, members: int, policy: str,
        *, hosts: Sequence[int] | None, ahead: bool,
    ) -> None:  # fmt: skip
        self.p, self.v, self.ahead = p, v, ahead
        self.stages: list[list[Rank]] = []
        self.boards: list[Stage] = []
        for rank in range(p):
            geometry = Geometry(p, rank, v, m, w_pieces=(3,) * v)
            boards = Stage(hosts, 2 * len(channels_of(geometry))) if hosts else None
            self.boards += [boards] if boards else []
            self.stages.append([Rank(geometry, policy, boards, i) for i in range(members)])

    def run(self, chance: random.Random) -> int:
        """Run to the end; returns the tasks out of Megatron's order. Some ranks and hosts are
        slow.
        """
        places = [(s, r) for s, stage in enumerate(self.stages) for r in range(len(stage))]
        places += [(s, -1) for s in range(len(self.boards))]  # the notes between hosts
        chance.shuffle(places)
        weights = sorted((chance.choice([1, 5, 25, 25]) for _ in places), reverse=True)
        while not all(rank.done for stage in self.stages for rank in stage):
            (place,) = chance.choices(places, weights)
            # All others thrice, as a member that posted an arrival in the first round ran no task,
            # and a note of it travels in the second.
            if not any(self._move(*other, chance) for other in [place, *places * 3]):
                raise AssertionError("stuck")
        return sum(r.decider.scheduler.num_out_of_order for stage in self.stages for r in stage)

    def _move(self, s: int, r: int, chance: random.Random) -> bool:
        """Let a message or note come, or end or begin a task; False if none is possible."""
        if r < 0:
            return self.boards[s].deliver(chance)
        messages_first = chance.random() < 0.5
        return (
            (messages_first and self.stages[s][r].deliver(chance))
            or self._end(s, r)
            or self._begin(s, r)
            or self.stages[s][r].deliver(chance)
        )

    def _end(self, s: int, r: int) -> bool:
        """End the running task, if it has its input and its collective is over: all have begun the
        same task.
        """
        rank = self.stages[s][r]
        if rank.num_ended == len(rank.began) or not rank.has_input(rank.began[-1]):
            return False
        action = rank.began[-1]
        if action.kind != Kind.W:
            count = len(rank.collectives)
            for member in self.stages[s]:
                if len(member.collectives) < count or member.collectives[count - 1] != action:
                    return False
        rank.num_ended += 1
        self._send(s, r, action)
        return True

    def _begin(self, s: int, r: int) -> bool:
        rank = self.stages[s][r]
        if rank.num_ended < len(rank.began) or rank.decider.done:
            return False
        action = rank.choose(ahead=self.ahead)
        if action is not None:
            rank.began.append(action)
            if action.kind != Kind.W:
                rank.collectives.append(action)
        return action is not None

    def _send(self, s: int, r: int, action: Action) -> None:
        stage = action.chunk * self.p + s
        step = {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
        target = stage + step
        if step and 0 <= target < self.p * self.v:
            way = Direction.FORWARD if step > 0 else Direction.BACKWARD
            self.stages[target % self.p][r].sent[way, target // self.p] += 1


def runs(count: int, *, agree: bool, most_hosts: int = 1) -> tuple[int, int]:
    """(stuck runs, tasks out of order) of ``count`` jobs of random shapes."""
    stuck = deviations = 0
    for seed in range(count):
        chance = random.Random(seed)
        p, v, m, members = (chance.randint(*ends) for ends in ((2, 3), (1, 2), (2, 5), (2, 4)))
        policy = chance.choice(["dynamic", "depth-first"])
        hosts = [chance.randrange(most_hosts) for _ in range(members)]
        ahead = chance.random() < 0.5
        job = Job(p, v, m * p, members, policy, hosts=hosts if agree else None, ahead=ahead)
        try:
            deviations += job.run(chance)
        except AssertionError as error:
            if str(error) != "stuck":
                raise
            stuck += 1
    return stuck, deviations


@pytest.mark.parametrize("most_hosts", [1, 3])
def test_late_members_never_wait_for_each_other(most_hosts: int) -> None:
    stuck, deviations = runs(25, agree=True, most_hosts=most_hosts)
    assert (stuck, deviations > 0) == (0, True)


def test_members_that_do_not_agree_wait_for_each_other() -> None:
    """So the test above can fail."""
    assert runs(30, agree=False)[0] > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("most_hosts", [1, 4])
def test_late_members_never_wait_for_each_other_in_thousands_of_runs(most_hosts: int) -> None:
    assert runs(5000, agree=True, most_hosts=most_hosts)[0] == 0


# By hand -----------------------------------------------------------------------------------------


def member(
    boards: Stage, index: int, geometry: Geometry, before: int = 0, **settings: Any
) -> Decider:
    """A decider with fused backwards and Megatron's order, if no other is asked for, behind so many
    messages of each channel.
    """
    chosen = {"policy": "megatron", "split_backward": False} | settings
    board = HostedBoard(boards, index)
    return decider_for(Scheduler(geometry, **chosen), links_of(geometry, board, before))


def members_of_the_last_rank(before: int = 0) -> tuple[Decider, Decider]:
    """A leader and its follower on the last of two ranks, with one input, in an iteration behind
    so many messages.
    """
    boards = Stage([0, 0], 2)
    leader, follower = (member(boards, index, Geometry(2, 1, 1, 2), before) for index in range(2))
    for decider in (leader, follower):
        assert decider.next([before]) is None and decider.held_up_by([before]) == ""
    return leader, follower


EVALUATION = Geometry(2, 1, 1, 2, forward_only=True)


def test_a_member_never_posts_less_at_the_beginning_of_an_iteration() -> None:
    """A message that was taken in flight may not have arrived when the next iteration begins. Those
    of the next iteration, which a neighbour may have sent already, are not told of before, but for
    those that have arrived.
    """
    boards = Stage([0, 0], 2)
    for base in (0, 2):
        decider = member(boards, 1, EVALUATION, base)
        decider.next([max(0, base - 1)])
        assert decider.next_coming([base + 3]) is None
    assert boards.posted[1] == [1, 4]
    boards = Stage([0, 0], 2)
    decider = member(boards, 1, EVALUATION)
    decider.next([3])
    assert decider.next_coming([4]) is None
    assert boards.posted[1] == [3, 3]


@pytest.mark.parametrize("before", [0, 2])
def test_a_member_tells_who_holds_it_up(before: int) -> None:
    """The last rank of two: an input allows a forward when all have it, and the leader decides.
    Counts go on from earlier iterations.
    """
    one, two = [before + 1], [before + 2]
    leader, follower = members_of_the_last_rank(before)
    assert leader.next(one) is None and leader.held_up_by(one) == "late-member"
    assert follower.next(one) is None and follower.held_up_by(one) == "late-leader"
    assert leader.held_up_by(one) == "late-member", "it has not looked since"
    assert str(leader.next(one)) == "0F0" and str(follower.next(one)) == "0F0"
    assert str(leader.next(one)) == "0B0", "the loss gives the last rank's gradients"
    assert follower.held_up_by(one) == "late-leader"
    assert str(follower.next(one)) == "0B0"
    assert leader.next(one) is None and follower.next(two) is None
    assert (leader.held_up_by(one), follower.held_up_by(two)) == ("", "late-member")


def test_arrivals_of_the_next_iteration_are_not_this_ones() -> None:
    """A neighbour may have sent its whole next iteration before this one ends."""
    leader, follower = members_of_the_last_rank(4)
    assert leader.next([9]) is follower.next([9]) is None, "the other has not told of it"
    for decider in (leader, follower):
        assert [str(decider.next([9])) for _ in range(4)] == ["0F0", "0B0", "0F1", "0B1"]
        assert decider.done and decider.next([9]) is None
        assert decider.scheduler.forwards_arrived == [2]


def test_a_leader_is_late_if_any_task_has_its_input_everywhere() -> None:
    """It is not to be excused by another task, whose input one member lacks."""
    boards = Stage([0, 0], 6)
    leader, follower = (
        member(boards, index, Geometry(2, 1, 2, 4), policy="dynamic", split_backward=True)
        for index in range(2)
    )
    assert follower.next([1, 0, 0]) is None and str(leader.next([1, 0, 0])) == "0F0"
    assert str(follower.next([1, 0, 0])) == "0F0"
    assert follower.next([1, 1, 0]) is None
    assert str(leader.next([1, 1, 0])) == "1F0", "which the follower has not read"
    assert follower.held_up_by([2, 1, 0]) == "late-leader"


def test_a_follower_forgets_no_arrival_for_one_that_was_in_flight() -> None:
    leader, follower = members_of_the_last_rank()
    for decider in (leader, follower):
        assert decider.next_coming([2]) is None
    assert follower.next([2]) is None, "all of them have arrived here since"
    assert str(leader.next([2])) == "0F0"
    assert str(follower.next([2])) == "0F0"
    assert follower.scheduler.forwards_arrived == [2]


def test_a_leader_launches_ahead_what_is_in_flight_to_all() -> None:
    leader, follower = members_of_the_last_rank()
    assert leader.next_coming([1]) is None, "not yet to the follower"
    assert follower.next_coming([1]) is None
    assert str(leader.next_coming([1])) == "0F0"
    assert str(follower.next([0])) == "0F0"


@pytest.mark.parametrize(("hosts", "early"), [([0, 0], False), ([0, 1], True)])
def test_only_a_leader_of_several_hosts_decides_ahead_and_once(
    hosts: list[int], early: bool
) -> None:
    """On one host a decision is known at once, and a later one is better informed. The leader tells
    what it has beside a task that was decided ahead: the one after it is decided by that.
    """
    boards = Stage(hosts, 2)
    leader = member(boards, 0, Geometry(2, 0, 1, 3))
    assert str(leader.next([0])) == "0F0"
    for _ in range(2):
        leader.look_ahead()
        assert [str(Action.from_word(w)) for w in boards.words[0]] == ["0F0", "0F1"][: 1 + early]
    assert not leader.done
    assert str(leader.next([1])) == "0F1" and len(boards.words[0]) == 2
    assert boards.posted[0] == [1, 1]
    alone = member(Stage(hosts, 0), 0, Geometry(1, 0, 1, 1))
    assert str(alone.next([])) == "0F0"
    alone.look_ahead()
    assert alone.scheduler.done is early and not alone.done, "it is still to be run"
    assert str(alone.next([])) == "0B0" and alone.done


def test_the_order_is_fixed_where_the_next_task_depends_on_no_arrival() -> None:
    unlike, split = {"sizes": [1, 8, 8, 8], "largest": 8}, {"split_backward": True}
    for policy, p, v, more, fixed in (
        ("megatron", 2, 1, {}, True), ("megatron", 2, 2, split, True), ("auto", 2, 1, {}, False),
        ("auto", 2, 2, {}, True), ("auto", 4, 2, {}, True), ("auto", 4, 2, unlike, False),
        ("dynamic", 2, 1, split, False), (Replay([]), 2, 1, split, True),
    ):  # fmt: skip
        given, geometry = {"split_backward": False, **more}, Geometry(p, p - 1, v, 4)
        scheduler = Scheduler(geometry, policy=policy, cap=16, **given)
        decider = decider_for(scheduler, links_of(geometry, None))
        assert decider.in_order is fixed, (policy, p, v, more)
