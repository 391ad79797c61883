"""The members of a stage run one order, however late their messages and they themselves are.

Each task but W waits for all members, as a collective in it would. The board is the fake one; a
generator decides who moves next.
"""

from __future__ import annotations

import random

import pytest

from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.stage_group import joined
from megatron.dpp.schedule import FORWARD, GRADIENT, Action, Geometry, Kind, Scheduler, parse_cap
from megatron.dpp.transport.fake import FakeNetwork


class Rank:
    """One member of a stage: its decider, what has arrived, and the tasks that it began."""

    def __init__(self, geometry: Geometry, policy: str, board: object) -> None:
        stages = [
            chunk * geometry.num_ranks + geometry.rank for chunk in range(geometry.num_chunks)
        ]
        last = geometry.num_ranks * geometry.num_chunks - 1
        self.channels = [(FORWARD, c) for c, stage in enumerate(stages) if stage > 0]
        self.channels += [(GRADIENT, c) for c, stage in enumerate(stages) if stage < last]
        self.sent = dict.fromkeys(self.channels, 0)
        self.arrived = dict.fromkeys(self.channels, 0)
        cap = parse_cap("auto", geometry).chunks
        scheduler = Scheduler(geometry, policy=policy, cap=cap, split_backward=True)
        self.decider = decider_for(scheduler, self.channels, board)  # type: ignore[arg-type]
        self.decider.start([0] * len(self.channels))
        self.began: list[Action] = []
        self.num_ended = 0

    @property
    def done(self) -> bool:
        return self.decider.scheduler.done and self.num_ended == len(self.began)

    def deliver(self, chance: random.Random) -> bool:
        """Let one message arrive; False if none is under way."""
        coming = [c for c in self.channels if self.arrived[c] < self.sent[c]]
        if coming:
            self.arrived[chance.choice(coming)] += 1
        return bool(coming)


class Job:
    """``members`` pipelines of ``p`` ranks; the ranks of a stage share collectives."""

    def __init__(self, p: int, v: int, m: int, members: int, policy: str, *, agree: bool) -> None:
        self.p, self.v = p, v
        network = FakeNetwork([])
        self.stages: list[list[Rank]] = []
        for stage in range(p):
            ranks = range(stage * members, (stage + 1) * members)
            geometry = Geometry(p, stage, v, m)
            num = sum(1 + (0 < c * p + stage < p * v - 1) for c in range(v)) if p * v > 1 else 0
            boards = [
                network.transport(rank, board_ranks=list(ranks), board_counters=num).board
                for rank in ranks
            ]
            self.stages.append(
                [Rank(geometry, policy, board if agree else None) for board in boards]
            )

    def run(self, chance: random.Random) -> int:
        """Run to the end; returns the tasks out of Megatron's order. Some ranks are slow."""
        places = [(s, r) for s, stage in enumerate(self.stages) for r in range(len(stage))]
        chance.shuffle(places)
        weights = sorted((chance.choice([1, 5, 25, 25]) for _ in places), reverse=True)
        while not all(self.stages[s][r].done for s, r in places):
            (place,) = chance.choices(places, weights)
            # All others twice, as a member that posted an arrival in the first round ran no task.
            if not any(self._move(*other, chance) for other in [place, *places * 2]):
                raise AssertionError("stuck")
        return sum(s.decider.scheduler.num_out_of_order for stage in self.stages for s in stage)

    def _move(self, s: int, r: int, chance: random.Random) -> bool:
        """Let a message come, or end or begin a task; False if the rank can do none of these."""
        messages_first = chance.random() < 0.5
        return (
            (messages_first and self.stages[s][r].deliver(chance))
            or self._end(s, r)
            or self._begin(s, r)
            or self.stages[s][r].deliver(chance)
        )

    def _end(self, s: int, r: int) -> bool:
        """End the running task, if its collective is over: all have begun the same task."""
        rank = self.stages[s][r]
        if rank.num_ended == len(rank.began):
            return False
        action = rank.began[-1]
        if action.kind != Kind.W:
            count = sum(a.kind != Kind.W for a in rank.began)
            for member in self.stages[s]:
                theirs = [a for a in member.began if a.kind != Kind.W]
                if len(theirs) < count or theirs[count - 1] != action:
                    return False
        rank.num_ended += 1
        self._send(s, r, action)
        return True

    def _begin(self, s: int, r: int) -> bool:
        rank = self.stages[s][r]
        if rank.num_ended < len(rank.began) or rank.decider.scheduler.done:
            return False
        action = rank.decider.next([rank.arrived[c] for c in rank.channels])
        if action is not None:
            rank.began.append(action)
        return action is not None

    def _send(self, s: int, r: int, action: Action) -> None:
        stage = action.chunk * self.p + s
        step = {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
        target = stage + step
        if step and 0 <= target < self.p * self.v:
            way = FORWARD if step > 0 else GRADIENT
            self.stages[target % self.p][r].sent[way, target // self.p] += 1


def runs(count: int, *, agree: bool) -> tuple[int, int]:
    """(stuck runs, tasks out of order) of ``count`` jobs of random shapes."""
    stuck = deviations = 0
    for seed in range(count):
        chance = random.Random(seed)
        p, v, m, members = (chance.randint(*ends) for ends in ((2, 3), (1, 2), (2, 5), (2, 4)))
        policy = chance.choice(["dynamic", "depth-first"])
        try:
            deviations += Job(p, v, m * p, members, policy, agree=agree).run(chance)
        except AssertionError as error:
            if str(error) != "stuck":
                raise
            stuck += 1
    return stuck, deviations


def test_late_members_never_wait_for_each_other() -> None:
    stuck, deviations = runs(60, agree=True)
    assert (stuck, deviations > 0) == (0, True)


def test_without_agreement_they_would() -> None:
    stuck, _ = runs(40, agree=False)
    assert stuck > 5


@pytest.mark.slow
def test_late_members_never_wait_for_each_other_in_thousands_of_runs() -> None:
    assert runs(3000, agree=True)[0] == 0


@pytest.mark.parametrize(
    ("groups", "rank", "together"),
    [
        ([], 3, (3,)),
        ([[0, 1], [2, 3]], 2, (2, 3)),
        ([[0, 1], [2, 3], [4, 5], [0, 1, 2], [3, 4, 5]], 5, (0, 1, 2, 3, 4, 5)),
        ([[6, 4], [4, 2], [1, 3], [2, 0]], 6, (0, 2, 4, 6)),
    ],
)
def test_overlapping_groups_are_joined(
    groups: list[list[int]], rank: int, together: tuple[int, ...]
) -> None:
    assert joined(groups, rank) == together
