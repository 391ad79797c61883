"""The loop that drives one iteration of one rank.

    poll channels -> tell the Scheduler what arrived -> ask for the next action -> run it -> hand on
    its output

The executor carries decisions out and makes none: what runs next is the Scheduler's (or the stage
leader's) choice, how a task is run is ``mcore.steps.Stage``'s, how tensors move is the transport's.
``DppSchedule`` builds one per iteration.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron.dpp.errors import ProtocolError, TransferTimeout
from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.runtime.inject import Injector, Task
from megatron.dpp.runtime.pace import Pace
from megatron.dpp.runtime.topology import Channels
from megatron.dpp.schedule import Action, Cause, Geometry, Kind
from megatron.dpp.trace import Recorder
from megatron.dpp.transport.base import Direction, Transport

_NAP_SECONDS = 0.05
"""Longest sleep between two looks at the world; an arrival ends it at once."""

_REST_SECONDS = 1e-3
"""Longest sleep beside a busy device, whose tasks may be shorter than expected."""

_WAKE_SECONDS = 2e-4
"""A rest ends so long before a decision is due, as sleeps take longer than they are asked to."""

_LOOK_SECONDS = 5e-5
"""Rest between two looks at a device that waits for an input."""

_MOST_PENDING = 8
"""Messages that may wait for a free slot while no cap bounds them, in an evaluation."""

_TRACE_CAUSES = {
    Cause.WARMUP: "warm-up",
    Cause.MEMORY_CAP: "memory-cap",
}
_KIND_NAMES = tuple(kind.name for kind in Kind)  # the enumeration takes longer to tell a name


Tensors = torch.Tensor | list[torch.Tensor]
"""What one boundary carries per microbatch; a list where it is several tensors."""


class TaskRunner(Protocol):
    """What the executor needs of a stage; ``mcore.steps.Stage`` is the real one."""

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors: ...

    def free_output(self, chunk: int, microbatch: int) -> None: ...

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None: ...

    def weight(self, chunk: int, microbatch: int, piece: int) -> None: ...

    def chunk_complete(self, chunk: int) -> None: ...


class Links:
    """An opened transport, the maps between its channels and tasks, and how far it has been read.

    Args:
        transport: opened with ``channels.specs``.
        channels: this rank's channels.
    """

    def __init__(self, transport: Transport, channels: Channels) -> None:
        channels.bind(transport.outgoing, transport.incoming)
        self.transport, self.channels = transport, channels
        self.consumed = [0] * len(transport.incoming)
        """Microbatches of earlier iterations, per incoming channel."""
        self._parts = [channels.tensors_in(index) for index in range(channels.num_incoming)]
        self._whole = max(self._parts, default=1) == 1

    def poll(self) -> Sequence[int]:
        """Microbatches that have arrived on each incoming channel with all of their tensors."""
        arrived = self.transport.poll()
        if self._whole:
            return arrived
        return [total // parts for total, parts in zip(arrived, self._parts, strict=True)]

    def coming(self) -> Sequence[int]:
        """As :meth:`poll`, with microbatches that are on their way and may be taken; empty where
        that is not known.
        """
        coming = self.transport.coming()
        if self._whole or not coming:
            return coming
        return [total // parts for total, parts in zip(coming, self._parts, strict=True)]

    def consume(self, geometry: Geometry) -> None:
        """An iteration is over: its microbatches have all been taken."""
        for index, (direction, _) in enumerate(self.channels.receiving):
            if not (geometry.forward_only and direction == Direction.BACKWARD):
                self.consumed[index] += geometry.num_microbatches


class Executor:
    """Runs all tasks of one iteration.

    Args:
        runner: carries tasks out.
        decider: says which task is next.
        links: the channels of this rank.
        recorder: told of every task, message and gap.
        pace: says when the next decision is due.
        injector: slows tasks down on purpose, or None.
        split_backward: weight gradients are tasks of their own.
        iteration: number that every message of this iteration carries.
        timeout: seconds without any progress after which the rank gives up.
        launch_ahead: launch a task before its input is there, where nothing else may run.
    """

    def __init__(
        self,
        *,
        runner: TaskRunner,
        decider: Decider,
        links: Links,
        recorder: Recorder,
        pace: Pace,
        injector: Injector | None,
        split_backward: bool,
        iteration: int,
        timeout: float,
        launch_ahead: bool = True,
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
        self._pace, self._injector = pace, injector
        self._iteration, self._timeout, self._launch_ahead = iteration, timeout, launch_ahead
        self._gap_start = 0
        self._gap_cause = ""
        self._gap_detail = ""
        self.actions: list[Action] = []
        """What was run so far, in order."""
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
        """Run until every task of the iteration has been carried out and its output is on its way.

        Raises:
            TransferTimeout: nothing could run for ``timeout`` seconds; names what is missing.
            TransportError: a peer died or a link failed.
        """
        scheduler, pace, poll = self._scheduler, self._pace, self._links.poll
        bounded = self._geometry.forward_only and not self._decider.followed
        while not scheduler.done:
            self._arrived = poll()
            if bounded:
                scheduler.hold_back(self._transport.pending() > _MOST_PENDING)
            if self._awaited is not None and not self._input_came():
                continue
            pause = pace.pause()
            if pause > 0.0:
                self._open_gap("lookahead")
                self._rest(pause - _WAKE_SECONDS)
                continue
            begin = time.perf_counter_ns()
            action = self._decider.next(self._arrived) or self._next_coming()
            if action is None:
                self._sleep()
                continue
            self._run(action)
            self.overhead_ns += time.perf_counter_ns() - begin - self._runner_ns
        while self._awaited is not None and not self._input_came():
            poll()  # what ends the wait may be a failure
        self._transport.flush(self._timeout)

    def _next_coming(self) -> Action | None:
        """Nothing may run: the task whose input is on its way, to be launched ahead of it. The
        device waits for the input then, and not for the host.
        """
        if self._gap_cause in ("", "lookahead"):
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

    def _begin(self, action: Action, ahead: bool = False) -> None:
        kind, chunk, microbatch, piece = action
        if not ahead:
            self._close_gap()  # else it lasts until the device has got the task's input
        self._recorder.begin_task(_KIND_NAMES[kind], chunk, microbatch, piece)
        self._pace.begin(ahead)

    def _receive(self, action: Action, direction: Direction) -> Tensors | None:
        """Begin a task and take its input; one that has not arrived yet comes before the
        beginning, and a gap lasts until it has.
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
            self._open_gap("message")  # if it was chosen without an idle look
            self._begin(action, ahead=True)
        return received

    def _forward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        received = self._receive(action, Direction.FORWARD)
        begin = time.perf_counter_ns()
        output = self._runner.forward(chunk, microbatch, received)
        self._runner_ns = time.perf_counter_ns() - begin
        self._finish_task("F", chunk, microbatch)
        if self._put(Direction.FORWARD, chunk, microbatch, output):
            self._runner.free_output(chunk, microbatch)

    def _backward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        received = self._receive(action, Direction.BACKWARD)
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
        begin = time.perf_counter_ns()
        self._runner.weight(chunk, microbatch, piece)
        self._runner_ns = time.perf_counter_ns() - begin
        self._finish_task("W", chunk, microbatch)
        self._count_complete(chunk)

    def _finish_task(self, kind: str, chunk: int, microbatch: int) -> None:
        """The task's own work is queued: prolong it if asked to, before its output may leave."""
        key = (kind, chunk)
        if self._injector is not None:
            cost = self._cost(kind, chunk)
            task = Task(self._iteration, kind, chunk, microbatch, self._work, cost)
            self._work += cost
            begin = time.perf_counter_ns()
            self._pace.prolong(key, self._injector.factor(task), self._injector.seconds(task))
            self._runner_ns += time.perf_counter_ns() - begin
        self._pace.launched(key)
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
        if message[1:5] != expected:
            names = "iteration {}, microbatch {}, tensor {} of {}"
            raise ProtocolError(
                f"{spec}: expected {names.format(*expected)}, got {names.format(*message[1:5])}; "
                "do all ranks run the same step?"
            )
        return message.tensor

    def _put(
        self, direction: Direction, chunk: int, microbatch: int, result: Tensors | None
    ) -> bool:
        """Hand a result to its channel; False at the end of the pipeline."""
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
        self._transport.put(
            channel, payload, iteration=self._iteration, microbatch=microbatch,
            part=part, num_parts=num_parts,
        )  # fmt: skip

    def _count_complete(self, chunk: int) -> None:
        """Report complete chunks in the order v-1..0, whatever order a policy finished them in."""
        self._owed[chunk] -= 1
        while self._next_complete >= 0 and self._owed[self._next_complete] == 0:
            self._runner.chunk_complete(self._next_complete)
            self._next_complete -= 1

    def _rest(self, seconds: float) -> None:
        """Leave the interpreter to other threads while the device is busy. A loop that only looked
        would keep it from a data loader's thread, and the next batch would come milliseconds late.
        """
        if seconds > 0.0:
            self._transport.wait(min(seconds, _REST_SECONDS))

    def _sleep(self) -> None:
        """Nothing may run: wait for an arrival, and give up after ``timeout`` seconds."""
        self._check_senders()
        waited = (time.monotonic_ns() - self._gap_start) * 1e-9
        held_back = self._geometry.forward_only and self._transport.pending() > _MOST_PENDING
        if waited > self._timeout:
            if held_back:
                self._transport.flush(0.0)  # says whose receivers take nothing
            raise TransferTimeout(self._timeout_text())
        nap = _REST_SECONDS if held_back else _NAP_SECONDS  # a slot that falls free wakes nobody
        self._transport.wait(min(nap, self._timeout - waited + 1e-3))

    def _input_came(self) -> bool:
        """Whether the device has got the input that it waits for, which ends the gap.

        Raises:
            TransferTimeout: it has waited for ``timeout`` seconds.
        """
        assert self._awaited is not None
        if not self._pace.waiting():
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
        """A message that is missing from a rank that has closed its links will never come."""
        left = {peer for peer in self._sources if self._transport.departed(peer)}
        if not left:
            return
        arrived = self._links.poll()  # after the look at the peer: its last message is in it
        for way, chunk in self._scheduler.stall().channels:
            index = self._channels.incoming(way, chunk)
            if index is None or self._channels.spec_in(index).source not in left:
                continue
            number = sum(a.kind == way and a.chunk == chunk for a in self.actions)
            if arrived[index] - self._consumed[index] <= number:
                raise self._transport.overdue(
                    index, 0.0, iteration=self._iteration, microbatch=number
                )

    def _describe_gap(self) -> None:
        if self._decider.followed:
            self._open_gap("tp-agreement")
            return
        stall = self._scheduler.stall()
        names = ("F", "B")
        waiting = " ".join(f"{names[way]}{chunk}" for way, chunk in stall.channels)
        self._open_gap(_TRACE_CAUSES.get(stall.cause, "message"), waiting)

    def _open_gap(self, cause: str, detail: str = "") -> None:
        if self._gap_cause == "lookahead" != cause:
            self._close_gap()
        if not self._gap_cause:
            self._gap_start = time.monotonic_ns()
            self._gap_cause, self._gap_detail = cause, detail

    def _close_gap(self) -> None:
        if self._gap_cause:
            self._recorder.gap(
                self._gap_start, time.monotonic_ns(), self._gap_cause, self._gap_detail
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
            ", or --dpp-policy waits for messages that its neighbours do not send either"
            if stall.cause is Cause.POLICY and not self._decider.followed
            else ""
        )
        return (
            f"{begin}; missing from: {', '.join(sources)}. Every peer's process is alive: one is "
            f"stopped or stuck, or slower than --dpp-timeout allows{either}"
        )
