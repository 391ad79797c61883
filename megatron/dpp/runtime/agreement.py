"""Deciders: a rank that decides for itself, or the leader and followers of a stage.

The ranks of a :class:`~megatron.dpp.runtime.stage_group.StageGroup` share collectives inside tasks,
so they must run the same tasks in the same order. Member 0 decides; an arrival counts only when all
members have it, and the decision travels over a :class:`~megatron.dpp.transport.base.Board`. There
is no collective per decision. A follower checks each decision against its own Scheduler, so a
disagreement is an error and not a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.runtime.links import Links
from megatron.dpp.schedule import BUILT_IN, DIRECTION_OF, Action, Kind, Replay, Scheduler
from megatron.dpp.schedule.policies import meant, megatron
from megatron.dpp.trace import IdleCause


class Decider:
    """A rank that decides for itself, in one iteration.

    Args:
        scheduler: at its start.
        links: the channels of this rank, and what earlier iterations consumed of them.
    """

    followed = False
    shares_order = False
    """True for a member of a stage."""

    def __init__(self, scheduler: Scheduler, links: Links) -> None:
        self.scheduler = scheduler
        channels = self._channels = links.receiving
        self._base = list(links.consumed)
        self._told = [0] * len(channels)
        self._index_of: dict[tuple[int, int], int] = {
            channel: index for index, channel in enumerate(channels)
        }
        self._seen: Sequence[int] = ()

    @property
    def done(self) -> bool:
        """No task is left to run."""
        return self.scheduler.done

    @property
    def in_order(self) -> bool:
        """The next task is the same whatever has arrived: no other could fill the wait for it."""
        scheduler, policy = self.scheduler, self.scheduler.policy
        if scheduler.weight() is not None or isinstance(policy, Replay):
            return isinstance(policy, Replay)
        one = scheduler.geometry.forward_only and scheduler.geometry.num_chunks == 1
        return policy in BUILT_IN.values() if one else meant(policy, scheduler) is megatron

    def look_ahead(self) -> None:
        """Decide the next task early, if the other members get to know of it late. Called once the
        size of the current task's microbatch is known: before it runs, or behind a first stage's F.
        """

    def next(self, arrived: Sequence[int]) -> Action | None:
        """The task to run now, given what this member has received; None: nothing may run yet.

        Args:
            arrived: microbatches per incoming channel, of all iterations; kept to compare, so a
                list that the caller changes later would not be noticed.
        """
        self._tell(arrived)
        return self.scheduler.next()

    def run_on(self, arrived: Sequence[int]) -> Action | None:
        """The next piece of the ``W`` of which a piece was run last, if :meth:`next` would return
        it. None: ask :meth:`next`.
        """
        return self.scheduler.run_on() if arrived == self._seen else None

    def next_coming(self, coming: Sequence[int]) -> Action | None:
        """The task that one message in flight allows, gradients first; None if none does.

        Only that message counts as arrived, so that no later choice depends on another. Where
        choices depend on none, all count.

        Args:
            coming: microbatches per incoming channel that have arrived or are in flight, as
                :meth:`next` takes them; empty if unknown.
        """
        if coming and self.in_order:
            self._tell(coming)
            return self.scheduler.next()
        index = self._wanted_in(coming) if coming else None
        if index is None:
            return None
        self._tell_one(index, self._told[index] + 1)
        return self.scheduler.next()

    def held_up_by(self, arrived: Sequence[int]) -> str:
        """The cause for which this member runs nothing although it could by itself: ``late-member``
        or ``late-leader``. Empty if it could not.

        Args:
            arrived: as :meth:`next` was given it.
        """
        return ""

    def _tell(self, arrived: Sequence[int]) -> None:
        if arrived == self._seen:
            return
        self._seen = arrived
        most = self.scheduler.geometry.num_microbatches
        for index, told in enumerate(self._told):
            total = arrived[index] - self._base[index]
            if total > told and told < most:
                self._tell_one(index, total if total < most else most)

    def _wanted_in(self, totals: Sequence[int]) -> int | None:
        """The first channel that allows a task by a message which is in ``totals`` and does not
        count yet.
        """
        indices = map(self._index_of.get, self.scheduler.wanted())
        return next(
            (i for i in indices if i is not None and self._counted(totals, i) > self._told[i]), None
        )

    def _counted(self, totals: Sequence[int], index: int) -> int:
        # What a neighbour sent for the next iteration is in it. Callers compare it with the number
        # of a microbatch of this one, so that changes nothing.
        return totals[index] - self._base[index]

    def _tell_one(self, index: int, total: int) -> None:
        self._told[index] = total
        self.scheduler.arrived(*self._channels[index], total)


class _Member(Decider):
    """One of several ranks of a stage; it posts on their board what has arrived, and what has
    arrived or is in flight.
    """

    shares_order = True

    def __init__(self, scheduler: Scheduler, links: Links) -> None:
        super().__init__(scheduler, links)
        assert links.transport.board is not None
        self._board = links.transport.board
        self._posted: Sequence[int] = ()
        self._coming = self._base  # posted already, perhaps before it had arrived

    def _post(self, arrived: Sequence[int]) -> None:
        if arrived != self._posted:
            self._posted = arrived
            self._board.post([*arrived, *map(max, arrived, self._coming)])

    def _post_coming(self, coming: Sequence[int]) -> None:
        # Of this iteration alone, so that no later one posts less.
        last = self.scheduler.geometry.num_microbatches
        bounded = [min(c, base + last) for c, base in zip(coming, self._base, strict=False)]
        if bounded and bounded != self._coming:
            self._coming = bounded
            self._board.post([*self._posted, *map(max, self._posted, bounded)])


class Leader(_Member):
    """Member 0 of a stage: decides for all, by the arrivals that all have.

    A word to another host takes longer than a look at shared memory. If the board spans hosts, the
    leader therefore decides the next task before it runs the current one.
    """

    _published: Action | None = None
    """The task that was decided ahead."""

    @property
    def done(self) -> bool:
        return super().done and self._published is None

    def next(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        if self._published is not None:
            action, self._published = self._published, None
            return action
        return self._decide()

    def run_on(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        if self._board.spans_hosts:  # the next task is decided already
            return None
        return self._publish(super().run_on(self._board.common()[: len(self._channels)]))

    def next_coming(self, coming: Sequence[int]) -> Action | None:
        self._post_coming(coming)
        if not coming:
            return None
        return self._publish(super().next_coming(self._board.common()[len(self._channels) :]))

    def held_up_by(self, arrived: Sequence[int]) -> str:
        return "" if self._wanted_in(arrived) is None else IdleCause.LATE_MEMBER

    def look_ahead(self) -> None:
        if self._board.spans_hosts and self._published is None:
            self._published = self._decide()

    def _decide(self) -> Action | None:
        return self._publish(super().next(self._board.common()[: len(self._channels)]))

    def _publish(self, action: Action | None) -> Action | None:
        if action is not None:
            self._board.append(action.word())
        return action


class Follower(_Member):
    """Any other member: posts its arrivals and runs the leader's tasks."""

    followed = True
    _read: Action | None = None
    """The leader's task between pieces of a ``W``, which was read in the place of the next one."""

    def next(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        action, self._read = self._read or self._next_word(), None
        if action is None:
            return None
        self._tell(arrived)
        self._tell_coming(action)
        self.scheduler.run(action)
        return action

    def run_on(self, arrived: Sequence[int]) -> Action | None:
        self._post(arrived)
        if self.scheduler.next_piece() is None:  # the next word may be of the next iteration
            return None
        action = self._next_word()
        if action is None or action.kind != Kind.W:
            self._read = action
            return None
        self.scheduler.run(action)
        return action

    def _next_word(self) -> Action | None:
        word = self._board.next()
        return None if word is None else Action.from_word(word)

    def held_up_by(self, arrived: Sequence[int]) -> str:
        """A board that spans hosts tells other hosts' members the arrivals of their own host."""
        self._tell(arrived)
        ready = self.scheduler.ready()
        if not ready:
            return ""
        common = self._board.common()
        allowed = any(self._has_input(action, common) for action in ready)
        return IdleCause.LATE_LEADER if allowed else IdleCause.LATE_MEMBER

    def _has_input(self, action: Action, arrived: Sequence[int]) -> bool:
        index = self._input_of(action)
        return index is None or self._counted(arrived, index) > self._number(action)

    def _input_of(self, action: Action) -> int | None:
        """Channel of a task's input; None where it needs no message."""
        return self._index_of.get((DIRECTION_OF.get(action.kind, -1), action.chunk))

    def _number(self, action: Action) -> int:
        """Messages that its channel carries before the input of a task."""
        return self.scheduler.geometry.position(action.kind, action.microbatch)

    def next_coming(self, coming: Sequence[int]) -> Action | None:
        """None: the leader decides, when all members have posted the message."""
        self._post_coming(coming)
        return None

    def _tell_coming(self, action: Action) -> None:
        """Count the input of a task as arrived if this member has posted that it is in flight."""
        index, number = self._input_of(action), self._number(action)
        if index is None or self._told[index] != number:
            return
        if self._counted(self._coming, index) > number:
            self._tell_one(index, number + 1)


def decider_for(scheduler: Scheduler, links: Links) -> Decider:
    """A decider for this rank: alone, leader or follower."""
    board = links.transport.board
    if board is None:
        return Decider(scheduler, links)
    return (Leader if board.index == 0 else Follower)(scheduler, links)
