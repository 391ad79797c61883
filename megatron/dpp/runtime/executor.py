"""The loop that drives one iteration of one rank.

    poll channels -> tell the Scheduler what arrived -> ask for the next action -> run it -> send
    its output

The executor decides nothing: the Scheduler or the stage's leader picks tasks, ``core.steps.Stage``
runs them, and the transport moves tensors. ``DppSchedule`` builds one per iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ProtocolError, TransferTimeout, setting
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.schedule import DIRECTION_OF, Action, Cause, Geometry, Kind
from megatron.dpp.trace import IdleCause, Recorder

_NAP_SECONDS = 0.05
"""Longest sleep without a task; an arrival ends it at once."""

_REST_SECONDS = 1e-3
"""Longest sleep beside a busy device, whose tasks may be shorter than expected."""

_WAKE_SECONDS = 2e-4
"""Margin by which a rest ends before a decision is due, as sleeps take longer than asked."""

_LOOK_SECONDS = 5e-5
"""Interval of looks at a device that waits for an input."""

_MOST_PENDING = 8
"""Pending sends of mean size from which a rank admits no new microbatch in an evaluation, where no
cap does.
"""

_TRACE_CAUSES = {
    Cause.WARMUP: IdleCause.WARM_UP,
    Cause.MEMORY_CAP: IdleCause.MEMORY_CAP,
}
_LOOKAHEAD, _MESSAGE = IdleCause.LOOKAHEAD, IdleCause.MESSAGE
_AGREEMENT = {IdleCause.LATE_MEMBER, IdleCause.LATE_LEADER}
_KIND_OF = {way: kind for kind, way in DIRECTION_OF.items()}
_KIND_NAMES = tuple(kind.name for kind in Kind)  # faster than an enumeration's ``name``


Tensors = torch.Tensor | list[torch.Tensor]
"""Content of one boundary per microbatch; a list if it is several tensors."""


class TaskRunner(Protocol):
    """The part of ``core.steps.Stage`` that the executor needs."""

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors: ...

    def free_output(self, chunk: int, microbatch: int) -> None: ...

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None: ...

    def weight(self, chunk: int, microbatch: int, piece: int) -> None: ...

    def chunk_complete(self, chunk: int) -> None: ...


class Executor:
    """Runs all tasks of one iteration.

    Args:
        runner: runs tasks.
        decider: picks the next task.
        links: the channels of this rank.
        recorder: records every task, message and gap.
        timer: says when the next decision is due.
        injector: slows tasks down on purpose, or None.
        split_backward: weight gradients are tasks of their own.
        iteration: number that every message of this iteration carries.
        timeout: seconds without any progress after which the rank gives up.
        launch_ahead: launch a task before its input has arrived, if nothing else may run.
        count_tokens: the tokens of a microbatch by the content of one of its boundaries, or None
            where it cannot tell.
        sizes_agree: all ranks that run this order have microbatches of the same sizes. If not,
            each counts as the longest.
    """

    def __init__(
        self,
        *,
        runner: TaskRunner,
        decider: Decider,
        links: Links,
        recorder: Recorder,
        timer: TaskTimer,
        injector: Injector | None,
        split_backward: bool,
        iteration: int,
        timeout: float,
        launch_ahead: bool = True,
        count_tokens: Callable[[Tensors], int | None] = lambda _: None,
        sizes_agree: bool = True,
    ) -> None:
        self._split_backward = split_backward
        self._runner, self._decider, self._recorder = runner, decider, recorder
        self._scheduler = decider.scheduler
        self._transport, self._channels = links.transport, links.channels
        self._links = links
        self._kinds = {link.peer: link.kind for link in links.transport.links()}
        self._consumed = links.consumed
        self._taken = list(links.consumed)
        self._arrived: Sequence[int] = ()
        self._awaited: tuple[int, int] | None = None
        """Channel and microbatch of the input that the device waits for."""
        self._sources = {spec.source for spec in links.transport.incoming}
        self._timer, self._injector = timer, injector
        self._tells_causes = recorder.enabled and decider.shares_order
        self._iteration, self._timeout, self._launch_ahead = iteration, timeout, launch_ahead
        self._count_tokens, self._sizes_agree = count_tokens, sizes_agree
        self.first_size: int | None = None
        """Tokens of microbatch 0; None where they cannot be counted."""
        self._num_puts = self._put_bytes = 0
        self._gap_start = self._cause_start = 0
        self._gap_cause = ""
        self._gap_detail = ""
        self.actions: list[Action] = []
        """Tasks run so far, in order."""
        self._runner_ns = 0
        self._work = 0.0
        self.overhead_ns = 0
        """Host time spent on tasks outside of the runner: deciding, taking, putting, recording."""
        self._owed = [self._tasks_owed(chunk) for chunk in range(self._geometry.num_chunks)]
        self._next_complete = self._geometry.num_chunks - 1
        self._run_kind = {Kind.F: self._forward, Kind.B: self._backward, Kind.W: self._weight}

    @property
    def _geometry(self) -> Geometry:
        return self._scheduler.geometry

    def run(self) -> None:
        """Run every task of the iteration, and wait until all outputs have left.

        Raises:
            TransferTimeout: nothing could run for ``timeout`` seconds; names what is missing.
            TransportError: a peer died or a link failed.
        """
        scheduler, decider, timer, poll = (
            self._scheduler,
            self._decider,
            self._timer,
            self._links.poll,
        )
        bounded = self._geometry.forward_only and not decider.followed
        while not decider.done:
            self._arrived = poll()
            if bounded:
                scheduler.hold_back(held=self._is_full())
            if self._awaited is not None and not self._input_came():
                continue
            pause = timer.pause()
            if pause > 0.0:
                self._open_gap(_LOOKAHEAD)
                self._rest(pause - _WAKE_SECONDS)
                continue
            begin = time.perf_counter_ns()
            action = decider.next(self._arrived) or self._next_coming()
            if action is None:
                self._sleep()
                continue
            self._run(action)
            self.overhead_ns += time.perf_counter_ns() - begin - self._runner_ns
        while self._awaited is not None and not self._input_came():
            poll()  # what ends the wait may be a failure
        self._transport.flush(self._timeout)

    def _next_coming(self) -> Action | None:
        """The task whose input is in flight, to be launched ahead of it if nothing else may run:
        the device then waits for the input, and not for the host.
        """
        if self._gap_cause in ("", _LOOKAHEAD) or self._tells_causes:
            self._describe_gap()
        return self._decider.next_coming(self._links.coming()) if self._launch_ahead else None

    def _tasks_owed(self, chunk: int) -> int:
        """Tasks after which a chunk's gradients are complete: its W pieces, or its fused B's."""
        geometry = self._geometry
        if geometry.forward_only:
            return 0
        pieces = geometry.pieces(chunk) if self._split_backward else 0
        return int(geometry.num_microbatches * max(pieces, 1))

    def _run(self, action: Action) -> None:
        self._run_kind[action.kind](action)
        self.actions.append(action)

    def _begin(self, action: Action, *, ahead: bool = False) -> None:
        kind, chunk, microbatch, piece = action
        if not ahead:
            self._close_gap()  # else it lasts until the device has got the task's input
        self._recorder.begin_task(_KIND_NAMES[kind], chunk, microbatch, piece)
        self._timer.begin(ahead=ahead)

    def _receive(self, action: Action, direction: Direction) -> Tensors | None:
        """Begin a task and take its input. An input in flight is taken first, and a gap lasts until
        it has arrived.
        """
        channel = self._channels.incoming(direction, action.chunk)
        if channel is None:
            self._begin(action)
            return None
        ahead = self._arrived[channel] <= self._taken[channel]
        if not ahead:
            self._begin(action)
        self._taken[channel] += 1
        received = self._take(channel, action.microbatch)
        if ahead:
            self._awaited = channel, action.microbatch
            self._open_gap(_MESSAGE)  # if it was chosen without an idle look
            self._begin(action, ahead=True)
        return received

    def _forward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        received = self._receive(action, Direction.FORWARD)
        output_tells = chunk == 0 and received is None
        if chunk == 0 and received is not None:
            self._learn(microbatch, received)
        if not output_tells:
            self._decider.look_ahead()
        begin = time.perf_counter_ns()
        output = self._runner.forward(chunk, microbatch, received)
        self._runner_ns = time.perf_counter_ns() - begin
        if output_tells:
            self._learn(microbatch, output)
            self._decider.look_ahead()
        self._finish_task("F", chunk, microbatch)
        if self._put(Direction.FORWARD, chunk, microbatch, output):
            self._runner.free_output(chunk, microbatch)

    def _learn(self, microbatch: int, tensors: Tensors) -> None:
        """Tell the scheduler the microbatch's size at its first forward on this rank, so all ranks
        of the stage learn it between the same two tasks.
        """
        tokens = self._count_tokens(tensors)
        if microbatch == 0:
            self.first_size = tokens
        if tokens is not None and self._sizes_agree:
            self._scheduler.learn(microbatch, tokens)

    def _backward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        received = self._receive(action, Direction.BACKWARD)
        self._decider.look_ahead()
        begin = time.perf_counter_ns()
        gradient = self._runner.backward(chunk, microbatch, received)
        self._runner_ns = time.perf_counter_ns() - begin
        self._finish_task("B", chunk, microbatch)
        self._put(Direction.BACKWARD, chunk, microbatch, gradient)
        if not self._split_backward or not self._geometry.pieces(chunk):
            self._count_complete(chunk)

    def _weight(self, action: Action) -> None:
        _, chunk, microbatch, piece = action
        self._begin(action)
        self._decider.look_ahead()
        begin = time.perf_counter_ns()
        self._runner.weight(chunk, microbatch, piece)
        self._runner_ns = time.perf_counter_ns() - begin
        self._finish_task("W", chunk, microbatch)
        self._count_complete(chunk)

    def _finish_task(self, kind: str, chunk: int, microbatch: int) -> None:
        """End a task whose work is queued; prolong it if asked to, before its output leaves."""
        key = (kind, chunk)
        if self._injector is not None:
            cost = self._cost(kind, chunk)
            task = Task(self._iteration, kind, chunk, microbatch, self._work, cost)
            self._work += cost
            begin = time.perf_counter_ns()
            self._timer.prolong(key, self._injector.factor(task), self._injector.seconds(task))
            self._runner_ns += time.perf_counter_ns() - begin
        sizes = self._scheduler.sizes
        self._timer.launched(key, sizes[microbatch] / sizes.largest)
        self._recorder.end_task()
        if self._recorder.enabled:
            self._recorder.counter("held", self._scheduler.held)

    def _cost(self, kind: str, chunk: int) -> float:
        """A task's nominal work, in forwards of a whole rank."""
        once = 1.0 / self._geometry.num_chunks
        pieces = self._geometry.pieces(chunk) if self._split_backward else 0
        if kind == "W":
            return once / pieces
        return once if kind == "F" or pieces else 2 * once

    def _take(self, channel: int, microbatch: int) -> Tensors:
        num_parts = self._channels.tensors_in(channel)
        if num_parts == 1:
            return self._take_part(channel, microbatch, 0, 1)
        return [self._take_part(channel, microbatch, part, num_parts) for part in range(num_parts)]

    def _take_part(self, channel: int, microbatch: int, part: int, num_parts: int) -> torch.Tensor:
        message = self._transport.take(channel)
        spec = self._channels.spec_in(channel)
        ahead = not message.arrived_ns
        if ahead and self._recorder.enabled:
            message = message._replace(arrived_ns=self._recorder.mark())
        self._recorder.taken(spec, message, ahead=ahead)
        expected = (self._iteration, microbatch, part, num_parts)
        found = (message.iteration, message.microbatch, message.part, message.num_parts)
        if found != expected:
            names = "iteration {}, microbatch {}, tensor {} of {}"
            raise ProtocolError(
                f"{spec}: expected {names.format(*expected)}, got {names.format(*found)}; "
                "do all ranks run the same step?"
            )
        return message.tensor

    def _put(
        self, direction: Direction, chunk: int, microbatch: int, result: Tensors | None
    ) -> bool:
        """Put a result into its channel; False at the end of the pipeline."""
        channel = self._channels.outgoing(direction, chunk)
        if channel is None:
            return False
        num_parts = self._channels.tensors_out(channel)
        given = result if isinstance(result, list) else [result]
        tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        if not len(tensors) == len(given) == num_parts:
            raise TypeError(
                f"chunk {chunk} returned {', '.join(type(t).__name__ for t in given)} to its "
                f"neighbour; {num_parts} Tensor{'s' * (num_parts > 1)} declared (one, unless "
                "adjust_tensor_shapes_fn returns more shapes)"
            )
        for part, tensor in enumerate(tensors):
            self._put_part(channel, microbatch, tensor, part, num_parts)
        return True

    def _put_part(
        self, channel: int, microbatch: int, tensor: torch.Tensor, part: int, num_parts: int
    ) -> None:
        # Detached: the transport must keep this storage even when the output's own .data is freed.
        payload = tensor.detach().contiguous()
        if self._recorder.enabled:  # before the put, or a fast copy could arrive before it was sent
            spec = self._channels.spec_out(channel)
            self._recorder.put(spec, microbatch, payload.nbytes, self._kinds[spec.destination])
        self._num_puts += 1
        self._put_bytes += payload.nbytes
        self._transport.put(
            channel, payload, iteration=self._iteration, microbatch=microbatch,
            part=part, num_parts=num_parts,
        )  # fmt: skip

    def _count_complete(self, chunk: int) -> None:
        """Report complete chunks in the order v-1..0, whatever the order of tasks."""
        self._owed[chunk] -= 1
        while self._next_complete >= 0 and self._owed[self._next_complete] == 0:
            self._runner.chunk_complete(self._next_complete)
            self._next_complete -= 1

    def _is_full(self) -> bool:
        """More waits to leave than :data:`_MOST_PENDING` mean messages, in two or more."""
        transport = self._transport
        if transport.pending() <= 1:
            return False
        return transport.pending_bytes() * self._num_puts > _MOST_PENDING * self._put_bytes

    def _rest(self, seconds: float) -> None:
        """Leave the interpreter to other threads while the device is busy; a busy loop would delay
        a data loader's thread by milliseconds.
        """
        if seconds > 0.0:
            self._transport.wait(min(seconds, _REST_SECONDS))

    def _sleep(self) -> None:
        """Wait for an arrival, and give up after ``timeout`` seconds."""
        self._check_senders()
        waited = (time.monotonic_ns() - self._gap_start) * 1e-9
        held_back = self._geometry.forward_only and self._is_full()
        if waited > self._timeout:
            if held_back:
                self._transport.flush(0.0)  # names the receivers that take nothing
            raise TransferTimeout(self._timeout_text())
        nap = _REST_SECONDS if held_back else _NAP_SECONDS  # a free slot wakes no sleeper
        self._transport.wait(min(nap, self._timeout - waited + 1e-3))

    def _input_came(self) -> bool:
        """True, and the end of the gap, when the device has the input that it waits for.

        Raises:
            TransferTimeout: it has waited for ``timeout`` seconds.
        """
        assert self._awaited is not None
        if not self._timer.waiting():
            self._awaited = None
            self._close_gap()
            return True
        waited = (time.monotonic_ns() - self._gap_start) * 1e-9
        if waited > self._timeout:
            channel, microbatch = self._awaited
            raise self._transport.overdue(
                channel, waited, iteration=self._iteration, microbatch=microbatch
            )
        self._rest(_LOOK_SECONDS)
        return False

    def _check_senders(self) -> None:
        """Raise if a missing message is from a rank that has closed its links."""
        left = {peer for peer in self._sources if self._transport.departed(peer)}
        if not left:
            return
        arrived = self._links.poll()  # after the look at the peer: its last message is in it
        for way, chunk in self._scheduler.stall().channels:
            index = self._channels.incoming(way, chunk)
            if index is None or self._channels.spec_in(index).source not in left:
                continue
            number = sum(a.kind == _KIND_OF[way] and a.chunk == chunk for a in self.actions)
            if arrived[index] - self._consumed[index] <= number:
                raise self._transport.overdue(
                    index, 0.0, iteration=self._iteration, microbatch=number
                )

    def _describe_gap(self) -> None:
        cause = self._decider.held_up_by(self._arrived) if self._tells_causes else ""
        if cause:
            self._open_gap(cause)
            return
        stall = self._scheduler.stall()
        waiting = " ".join(f"{_KIND_OF[way].name}{chunk}" for way, chunk in stall.channels)
        self._open_gap(_TRACE_CAUSES.get(stall.cause, _MESSAGE), waiting)

    def _open_gap(self, cause: str, detail: str = "") -> None:
        """Begin a gap, or go on with it for another cause if it began or goes on with another
        member's delay.
        """
        if self._gap_cause == _LOOKAHEAD != cause:
            self._close_gap()
        now = time.monotonic_ns()
        if not self._gap_cause:
            self._gap_start = now
        elif cause == self._gap_cause or not {cause, self._gap_cause} & _AGREEMENT:
            return
        else:
            self._recorder.gap(self._cause_start, now, self._gap_cause, self._gap_detail)
        self._cause_start, self._gap_cause, self._gap_detail = now, cause, detail

    def _close_gap(self) -> None:
        if self._gap_cause:
            self._recorder.gap(
                self._cause_start, time.monotonic_ns(), self._gap_cause, self._gap_detail
            )
            self._gap_cause = ""

    def _timeout_text(self) -> str:
        stall = self._scheduler.stall()
        begin = (
            f"rank {self._transport.rank} could run nothing for {self._timeout:g} s in iteration "
            f"{self._iteration} ({stall.text})"
        )
        specs = [
            self._channels.spec_in(index)
            for way, chunk in stall.channels
            if (index := self._channels.incoming(way, chunk)) is not None
        ]
        sources: Sequence[str] = sorted({str(spec) for spec in specs}) or [
            "the leader of this stage"
        ]
        either = (
            f", or {setting('policy')} waits for messages that its neighbours do not send either"
            if stall.cause is Cause.POLICY and not self._decider.followed
            else ""
        )
        return (
            f"{begin}; missing from: {', '.join(sources)}. Every peer's process is alive: one is "
            f"stopped or stuck, or slower than {setting('timeout')} allows{either}"
        )
