"""Deciders: a rank that decides for itself, or the leader and followers of a stage.

The ranks of a :class:`~megatron.dpp.runtime.stage_group.StageGroup` share collectives inside tasks,
so they must run the same tasks in the same order. Member 0 decides; an arrival counts only when all
members have it, and the decision travels over a :class:`~megatron.dpp.transport.base.Board`. There
is no collective per decision. A follower checks each decision against its own Scheduler, so a
disagreement is an error and not a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.schedule import Action, Scheduler
from megatron.dpp.transport.base import Board


class Decider:
    """A rank that decides for itself."""

    followed = False

    def __init__(self, scheduler: Scheduler, channels: Sequence[tuple[int, int]]) -> None:
        self.scheduler = scheduler
        self._channels = channels
        self._base = [0] * len(channels)
        self._told = [0] * len(channels)
        self._index_of = {channel: index for index, channel in enumerate(channels)}
        self._seen: Sequence[int] = ()

    def start(self, arrived_before: Sequence[int]) -> None:
        """Begin an iteration; later counts are relative to these, per incoming channel."""
        self._base = list(arrived_before)

    def next(self, arrived: Sequence[int]) -> Action | None:
        """The task to run now, given what this member has received; None: nothing may run yet.

        Args:
            arrived: microbatches per incoming channel, of all iterations; kept to compare, so a
                list that the caller changes later would not be noticed.
        """
        self._tell(arrived)
        return self.scheduler.next()

    def next_coming(self, coming: Sequence[int]) -> Action | None:
        """The task that one message in flight allows, gradients first; None if none does.

        Only that message counts as arrived, so that no later choice depends on another.

        Args:
            coming: microbatches per incoming channel that have arrived or are in flight, as
                :meth:`next` takes them; empty if unknown.
        """
        if not coming:
            return None
        for channel in self.scheduler.wanted():
            index = self._index_of.get(channel)
            if index is not None and self._counted(coming, index) > self._told[index]:
                self._tell_one(index, self._told[index] + 1)
                return self.scheduler.next()
        return None

    def _tell(self, arrived: Sequence[int]) -> None:
        if arrived == self._seen:
            return
        self._seen = arrived
        for index in range(len(self._channels)):
            total = self._counted(arrived, index)
            if total > self._told[index]:
                self._tell_one(index, total)

    def _counted(self, totals: Sequence[int], index: int) -> int:
        # A neighbour may be ahead: what it sent for the next iteration does not count yet.
        return min(totals[index] - self._base[index], self.scheduler.geometry.num_microbatches)

    def _tell_one(self, index: int, total: int) -> None:
        self._told[index] = total
        self.scheduler.arrived(*self._channels[index], total)


class _Member(Decider):
    """One of several ranks of a stage; it posts its arrivals on their board."""

    def __init__(
        self, scheduler: Scheduler, channels: Sequence[tuple[int, int]], board: Board
    ) -> None:
        super().__init__(scheduler, channels)
        self._board = board
        self._posted: Sequence[int] = ()

    def next_coming(self, coming: Sequence[int]) -> Action | None:
        """None: the other members may not get the same message."""
        return None

    def _post(self, arrived: Sequence[int]) -> None:
        if arrived != self._posted:
            self._posted = arrived
            self._board.post(arrived)


class Leader(_Member):
    """Member 0 of a stage: decides for all, by the arrivals that all have."""

    def next(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        action = super().next(self._board.common())
        if action is not None:
            self._board.append(action.word())
        return action


class Follower(_Member):
    """Any other member: posts its arrivals and runs the leader's tasks."""

    followed = True

    def next(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        word = self._board.next()
        if word is None:
            return None
        self._tell(arrived)
        action = Action.from_word(word)
        self.scheduler.run(action)
        return action


def decider_for(
    scheduler: Scheduler, channels: Sequence[tuple[int, int]], board: Board | None
) -> Decider:
    """A decider for this rank: alone, leader or follower."""
    if board is None:
        return Decider(scheduler, channels)
    return (Leader if board.index == 0 else Follower)(scheduler, channels, board)
