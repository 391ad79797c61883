"""The loop that drives one iteration of one rank.

    poll channels -> tell the Scheduler what arrived -> ask for the next action -> run it -> send
    its output

The executor decides nothing: the Scheduler or the stage's leader picks tasks, ``core.steps.Stage``
runs them, :class:`~megatron.dpp.runtime.mail.Mail` moves tensors, and
:class:`~megatron.dpp.runtime.gaps.Gaps` tells why nothing runs. ``DppSchedule`` builds one per
iteration.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.dpp.direction import Direction
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.gaps import Gaps
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Mail, Tensors
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.schedule import Action, Kind, Scheduler
from megatron.dpp.trace import IdleCause, Recorder

_NAP_SECONDS = 0.05
"""Longest sleep without a task; an arrival ends it at once."""

_REST_SECONDS = 1e-3
"""Longest sleep beside a busy device, whose tasks may be shorter than expected."""

_WAKE_SECONDS = 2e-4
"""Margin by which a rest ends before a decision is due, as sleeps take longer than asked."""

_LOOK_SECONDS = 5e-5
"""Interval of looks at a device that waits for an input."""

_KIND_NAMES = tuple(kind.name for kind in Kind)  # faster than an enumeration's ``name``


class TaskRunner(Protocol):
    """The part of ``core.steps.Stage`` that the executor needs."""

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors: ...

    def free_output(self, chunk: int, microbatch: int) -> None: ...

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None: ...

    def weight(self, chunk: int, microbatch: int, piece: int) -> None: ...

    def chunk_complete(self, chunk: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The settings of one iteration.

    Args:
        number: that every message of this iteration carries.
        timeout: seconds without any progress after which the rank gives up.
        count_tokens: the tokens of a microbatch by the content of one of its boundaries, or None
            where it cannot tell.
        sizes_agree: all ranks that run this order have microbatches of the same sizes. If not,
            each counts as the longest.
        longer: by how much a task of each microbatch takes longer than its tokens tell, by the name
            of the kind; kinds that are missing follow the tokens.
    """

    number: int
    timeout: float
    count_tokens: Callable[[Tensors], int | None] = lambda _: None
    sizes_agree: bool = True
    longer: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Executor:
    """Runs all tasks of one iteration.

    Args:
        runner: runs tasks.
        scheduler: at its start; it decides, or its stage's leader does.
        links: the channels of this rank.
        recorder: records every task, message and gap.
        timer: says when the next decision is due.
        injector: slows tasks down on purpose, or None.
        iteration: its settings.
    """

    def __init__(
        self,
        *,
        runner: TaskRunner,
        scheduler: Scheduler,
        links: Links,
        recorder: Recorder,
        timer: TaskTimer,
        injector: Injector | None,
        iteration: Iteration,
    ) -> None:
        self._runner, self._links, self._recorder = runner, links, recorder
        self._transport = links.transport
        self._scheduler, self._geometry = scheduler, scheduler.geometry
        self._decider = decider_for(scheduler, links)
        self._iteration, self._timeout = iteration, iteration.timeout
        units = self._geometry.backward_units
        self._mail = Mail(links, recorder, iteration.number, iteration.timeout, units)
        self._gaps = Gaps(recorder, self._decider)
        self._timer, self._injector = timer, injector
        self._awaited: deque[tuple[int, int]] = deque()
        """Channel and microbatch of the inputs that the device may wait for, oldest first."""
        self._awaited_since = 0.0
        self.first_size: int | None = None
        """Tokens of microbatch 0; None where they cannot be counted."""
        self.actions: list[Action] = []
        """Tasks begun so far, in order."""
        self.overhead_ns = 0
        """Host time spent on tasks outside of the runner: deciding, taking, putting, recording."""
        self._runner_ns = 0
        self._records = recorder.enabled
        sizes = self._scheduler.sizes
        self._largest = sizes.largest
        self._shares = [1.0 if n is None else n / self._largest for n in sizes.known]
        """The size of each microbatch, in the largest."""
        self._longer = iteration.longer
        self._work = 0.0
        self._pieces, number = scheduler.pieces, self._geometry.num_microbatches
        self._owed = [number * max(pieces, 1) for pieces in self._pieces]
        """Tasks after which a chunk's gradients are complete: its W pieces, or its fused B's."""
        self._run_kind = {Kind.F: self._forward, Kind.B: self._backward, Kind.W: self._weight}

    def run(self) -> None:
        """Run every task of the iteration, and wait until all outputs have left.

        Raises:
            TransferTimeout: nothing could run for ``timeout`` seconds; names what is missing.
            TransportError: a peer died or a link failed.
        """
        decider, mail, timer, poll = self._decider, self._mail, self._timer, self._mail.poll
        run_kind, actions, now = self._run_kind, self.actions, time.perf_counter_ns
        bounded = self._geometry.forward_only and not decider.followed
        begin = 0
        while not decider.done:
            arrived = poll()
            if bounded:
                self._scheduler.hold_back(held=mail.is_full())
            in_order = decider.in_order
            if self._awaited and not self._inputs_came() and not in_order:
                self._rest(_LOOK_SECONDS)
                begin = 0
                continue
            pause = 0.0 if in_order or decider.followed else timer.pause()
            if pause > 0.0:
                self._gaps.open(IdleCause.LOOKAHEAD)
                self._rest(pause - _WAKE_SECONDS)
                begin = 0
                continue
            begin = begin or now()
            action = decider.next(arrived) or self._next_coming()
            if action is None:
                self._sleep()
                begin = 0
                continue
            actions.append(action)
            self._runner_ns = 0
            run_kind[action.kind](action)
            end = now()
            self.overhead_ns += end - begin - self._runner_ns
            begin = end
        while self._awaited and not self._inputs_came():
            self._rest(_LOOK_SECONDS)
            poll()  # what ends the wait may be a failure
        self._transport.flush(self._timeout)
        self._links.consume(self._geometry)

    def _next_coming(self) -> Action | None:
        """The task whose input is in flight, to be launched ahead of it if nothing else may run:
        the device then waits for the input, and not for the host. Fused backwards are too long to
        be chosen early.
        """
        self._gaps.describe(self._mail.arrived)
        ahead = any(self._pieces) or self._geometry.forward_only or self._decider.in_order
        return self._decider.next_coming(self._links.coming() if ahead else ())

    def _begin(self, action: Action, *, ahead: bool = False) -> None:
        kind, chunk, microbatch, piece = action
        self._gaps.close()
        if self._records:
            self._recorder.begin_task(_KIND_NAMES[kind], chunk, microbatch, piece)
        self._timer.begin(ahead=ahead)

    def _receive(self, action: Action, direction: Direction) -> Tensors | None:
        """Begin a task and take its input. An input in flight is taken first, so that the task
        begins, and a gap ends, when the device has it.
        """
        mail = self._mail
        channel = mail.incoming(direction, action.chunk)
        if channel is None:
            self._begin(action)
            return None
        if not mail.is_ahead(channel):
            self._begin(action)
            return mail.take(channel, action.microbatch)
        if not self._gaps.cause:  # it was chosen without an idle look
            self._gaps.open(IdleCause.MESSAGE, f"{_KIND_NAMES[action.kind]}{action.chunk}")
        if not self._awaited:
            self._awaited_since = time.monotonic()
        self._awaited.append((channel, action.microbatch))
        received = mail.take(channel, action.microbatch)
        self._begin(action, ahead=True)
        return received

    def _timed(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call the runner, whose time is no overhead."""
        begin = time.perf_counter_ns()
        result = function(*given)
        self._runner_ns += time.perf_counter_ns() - begin
        return result

    def _forward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        received = self._receive(action, Direction.FORWARD)
        output_tells = chunk == 0 and received is None
        if chunk == 0 and received is not None:
            self._learn(microbatch, received)
        if not output_tells:
            self._decider.look_ahead()
        output = self._timed(self._runner.forward, chunk, microbatch, received)
        if output_tells:
            self._learn(microbatch, output)
            self._decider.look_ahead()
        self._finish_task("F", chunk, microbatch)
        if self._mail.put(Direction.FORWARD, chunk, microbatch, output):
            self._runner.free_output(chunk, microbatch)

    def _learn(self, microbatch: int, tensors: Tensors) -> None:
        """Tell the scheduler the microbatch's size at its first forward on this rank, so all ranks
        of the stage learn it between the same two tasks.
        """
        tokens = self._iteration.count_tokens(tensors)
        if microbatch == 0:
            self.first_size = tokens
        if tokens is not None and self._iteration.sizes_agree:
            self._scheduler.learn(microbatch, tokens)
            self._shares[microbatch] = tokens / self._largest

    def _backward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        fused = self._scheduler.fused  # before the next task is decided
        received = self._receive(action, Direction.BACKWARD)
        self._decider.look_ahead()
        gradient = self._timed(self._runner.backward, chunk, microbatch, received)
        self._finish_task("B", chunk, microbatch)
        self._mail.put(Direction.BACKWARD, chunk, microbatch, gradient)
        if fused:
            self._all_weights(chunk, microbatch)
        elif not self._pieces[chunk]:
            self._count_complete(chunk)

    def _all_weights(self, chunk: int, microbatch: int) -> None:
        """Run all pieces of the W that a fused B includes, whose output has left already."""
        pieces = range(self._pieces[chunk])
        for run in [pieces] if self._injector is None else [[piece] for piece in pieces]:
            self._run_pieces(chunk, microbatch, run)

    def _weight(self, action: Action) -> None:
        self._decider.look_ahead()
        self._run_pieces(action.chunk, action.microbatch, self._following(action))

    def _run_pieces(self, chunk: int, microbatch: int, pieces: Iterable[int]) -> None:
        """Run pieces of one W, which the timer takes together."""
        number, held = 0, 0.0
        for piece in pieces:
            if number == 0:
                self._begin(Action(Kind.W, chunk, microbatch, piece))
            elif self._records:
                self._recorder.end_task()
                self._recorder.counter("held", held)
                self._recorder.begin_task("W", chunk, microbatch, piece)
            self._timed(self._runner.weight, chunk, microbatch, piece)
            number += 1
            held = self._scheduler.held if self._records else 0.0  # before the next piece counts
        self._finish_task("W", chunk, microbatch, number)
        for _ in range(number):
            self._count_complete(chunk)

    def _following(self, first: Action) -> Iterator[int]:
        """Pieces of one W from the first on, as long as the next choice is its next piece: none
        where another task may be next, or where each is to be prolonged.
        """
        yield first.piece
        key, size, number = ("W", first.chunk), self._shares[first.microbatch], 1
        follows = self._decider.followed
        while self._injector is None and (follows or self._timer.goes_on(key, size, number)):
            action = self._decider.run_on(self._mail.poll())
            if action is None:
                return
            self.actions.append(action)
            number += 1
            yield action.piece

    def _finish_task(self, kind: str, chunk: int, microbatch: int, number: int = 1) -> None:
        """End a task whose work is queued, or ``number`` of one kind; prolong it if asked to,
        before its output leaves.
        """
        key = (kind, chunk)
        if (injector := self._injector) is not None:
            cost = self._cost(kind, chunk)
            task = Task(self._iteration.number, kind, chunk, microbatch, self._work, cost)
            self._work += cost
            prolong = self._timer.prolong
            self._timed(lambda: prolong(key, injector.factor(task), injector.seconds(task)))
        size = self._shares[microbatch]
        if kind in self._longer:
            size *= self._longer[kind][microbatch]
        self._timer.launched(key, size, number)
        if self._records:
            self._recorder.end_task()
            self._recorder.counter("held", self._scheduler.held)

    def _cost(self, kind: str, chunk: int) -> float:
        """A task's nominal work, in forwards of a whole rank."""
        once, pieces = 1.0 / self._geometry.num_chunks, self._pieces[chunk]
        if kind == "W":
            return once / pieces
        return once if kind == "F" or pieces else 2 * once

    def _count_complete(self, chunk: int) -> None:
        """Report complete chunks in the order v-1..0, whatever the order of tasks."""
        self._owed[chunk] -= 1
        while self._owed and self._owed[-1] == 0:
            self._owed.pop()
            self._runner.chunk_complete(len(self._owed))

    def _rest(self, seconds: float) -> None:
        """Leave the interpreter to other threads while the device is busy; a busy loop would delay
        a data loader's thread by milliseconds.
        """
        if seconds > 0.0:
            self._transport.wait(min(seconds, _REST_SECONDS))

    def _sleep(self) -> None:
        """Wait for an arrival, and give up after ``timeout`` seconds."""
        mail = self._mail
        mail.check_senders(self._scheduler.stall)
        waited = self._gaps.seconds
        held_back = self._geometry.forward_only and mail.is_full()
        if waited > self._timeout:
            if held_back:
                self._transport.flush(0.0)  # names the receivers that take nothing
            raise mail.stalled(self._scheduler.stall(), followed=self._decider.followed)
        nap = _REST_SECONDS if held_back else _NAP_SECONDS  # a free slot wakes no sleeper
        self._transport.wait(min(nap, self._timeout - waited + 1e-3))

    def _inputs_came(self) -> bool:
        """True when the device has all inputs of tasks that were launched ahead.

        Raises:
            TransferTimeout: it has waited for the oldest one for ``timeout`` seconds.
        """
        now, num_awaited = time.monotonic(), self._timer.waiting()
        while len(self._awaited) > num_awaited:
            self._awaited.popleft()
            self._awaited_since = now
        waited = now - self._awaited_since
        if self._awaited and waited > self._timeout:
            channel, microbatch = self._awaited[0]
            raise self._transport.overdue(
                channel, waited, iteration=self._iteration.number, microbatch=microbatch
            )
        return not self._awaited
