"""Recording megatron-core's own (static) schedules, so that they can be compared with the dynamic
one.

megatron-core 0.16.1's step functions call the module-level ``forward_step`` and ``backward_step``
of ``megatron.core.pipeline_parallel.schedules`` and exchange tensors through
``P2PCommunicator._communicate``. For the time of a ``with`` block these three are wrapped: tasks,
waits for messages and both ends of every message go to the recorder, under the names that the
dynamic executor uses. The training loop is the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.dpp.mcore import compat
from megatron.dpp.trace import Recorder

_FORWARD_STEP = "pipeline_parallel.schedules:forward_step"
_BACKWARD_STEP = "pipeline_parallel.schedules:backward_step"
_COMMUNICATE = "pipeline_parallel.p2p_communication:P2PCommunicator._communicate"
_FORWARD, _BACKWARD = 0, 1


class _Channel(NamedTuple):
    """The part of a channel that a trace names; ``chunk`` is the receiver's."""

    source: int
    destination: int
    chunk: int
    direction: int


class _Task(NamedTuple):
    chunk: int
    microbatch: int


@dataclass
class _Arrival:
    """A message received, as :class:`megatron.dpp.trace.recorder.TakenMessage`."""

    tensor: torch.Tensor
    arrived_ns: Any
    source: int
    destination: int
    iteration: int = 0
    microbatch: int = 0
    sent_ns: int | None = None


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors


class _TimedHandle:
    """Stands for the handle of a receive whose wait comes later."""

    def __init__(self, handle: Any, on_wait: Callable[[Any], None]) -> None:
        self._handle, self._on_wait = handle, on_wait

    def wait(self, *args: Any) -> Any:
        return self._on_wait(lambda: self._handle.wait(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _StaticTrace:
    """The wrappers and what they must remember.

    Tensors are recognised by identity: a forward's output is what is sent and later handed to
    ``backward_step``, a received tensor is what a later step gets as its input. So a message's
    chunk and microbatch are known when it is used, and its arrival is recorded then, with the time
    at which the wait for it ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[int, _Task] = {}
        self._received: dict[int, _Arrival] = {}
        self._tasks_run = 0
        self._iteration = -1
        self._communicator: P2PCommunicator | None = None

    def _enter_iteration(self) -> None:
        """Forget what an earlier iteration left; an evaluation's outputs are never handed to a
        backward.
        """
        if self._recorder.iteration != self._iteration:
            self._made.clear()
            self._received.clear()
            self._tasks_run = 0
            self._iteration = self._recorder.iteration

    def forward_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``schedules.forward_step``: its fifth argument is the input, its result starts with the
        output.
        """
        self._enter_iteration()
        given = kwargs["input_tensor"] if "input_tensor" in kwargs else args[4]
        task = _Task(kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0)
        self._used(_first(given), task, _FORWARD)
        self._recorder.begin_task("F", *task)
        result = original(*args, **kwargs)
        self._recorder.end_task()
        self._tasks_run += 1
        output = _first(result[0])
        if isinstance(output, torch.Tensor):
            self._made[id(output)] = task
        return result

    def backward_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``schedules.backward_step(input, output, output gradient, ...)``, which returns the
        input's gradient.
        """
        _, output, gradient = args[:3]
        task = self._made.pop(id(_first(output)), _Task(0, 0))
        self._used(_first(gradient), task, _BACKWARD)
        self._recorder.begin_task("B", *task)
        result = original(*args, **kwargs)
        self._recorder.end_task()
        if isinstance(_first(result), torch.Tensor):
            self._made[id(_first(result))] = task
        return result

    def communicate(self, original: Callable[..., Any], communicator: Any, **kwargs: Any) -> Any:
        """``P2PCommunicator._communicate``: two sends, two receives, and perhaps handles to wait on
        later.
        """
        self._enter_iteration()
        self._communicator = communicator
        self._sent(kwargs["tensor_send_next"], communicator.next_rank, _FORWARD)
        self._sent(kwargs["tensor_send_prev"], communicator.prev_rank, _BACKWARD)
        waited = kwargs.get("wait_on_reqs", True)
        receives = kwargs["recv_prev"] or kwargs["recv_next"]
        if not waited:
            return self._later(*original(communicator, **kwargs))
        start = self._recorder.mark()
        result = original(communicator, **kwargs)
        end = self._recorder.mark()
        self._gap(start, end, self._cause() if receives else "send", kwargs["recv_prev"])
        self._got(result[0], communicator.prev_rank, end)
        self._got(result[1], communicator.next_rank, end)
        return result

    def _later(self, previous: Any, following: Any, handles: Any) -> tuple[Any, Any, Any]:
        communicator = self._communicator
        assert communicator is not None
        arriving = {
            "recv_prev": (previous, communicator.prev_rank),
            "recv_next": (following, communicator.next_rank),
        }
        for name, (tensor, peer) in arriving.items():
            if name in handles:
                handles[name] = self._timed(handles[name], name == "recv_prev", tensor, peer)
        return previous, following, handles

    def _timed(self, handle: Any, forward: bool, tensor: Any, peer: int | None) -> _TimedHandle:
        def wait(original: Callable[[], Any]) -> Any:
            start = self._recorder.mark()
            result = original()
            end = self._recorder.mark()
            self._gap(start, end, self._cause(), forward)
            self._got(tensor, peer, end)
            return result

        return _TimedHandle(handle, wait)

    def _cause(self) -> str:
        return "message" if self._tasks_run else "warm-up"

    def _gap(self, start: Any, end: Any, cause: str, forward: bool) -> None:
        detail = "" if cause == "send" else "forward" if forward else "backward"
        self._recorder.gap(start, end, cause, detail)

    def _sent(self, tensor: Any, peer: int | None, direction: int) -> None:
        task = self._made.get(id(tensor))
        if tensor is None or task is None or self._communicator is None:
            return
        group = self._communicator.pp_group
        last = group.size() - 1 if direction == _FORWARD else 0
        step = 1 if direction == _FORWARD else -1
        chunk = task.chunk + (step if group.rank() == last else 0)
        channel = _Channel(torch.distributed.get_rank(), peer or 0, chunk, direction)
        self._recorder.put(channel, task.microbatch, tensor.nbytes, "p2p")
        if direction == _BACKWARD:
            del self._made[id(tensor)]

    def _got(self, tensor: Any, peer: int | None, arrived: Any) -> None:
        if tensor is not None:
            own = torch.distributed.get_rank()
            self._received[id(tensor)] = _Arrival(tensor, arrived, peer or 0, own)

    def _used(self, tensor: Any, task: _Task, direction: int) -> None:
        message = self._received.pop(id(tensor), None)
        if message is None:
            return
        message.iteration, message.microbatch = self._iteration, task.microbatch
        channel = _Channel(message.source, message.destination, task.chunk, direction)
        self._recorder.taken(channel, message)


@contextlib.contextmanager
def instrument_static_schedule(recorder: Recorder) -> Iterator[None]:
    """Record what megatron-core's schedules do while the block runs, between ``begin_iteration``
    and ``end_iteration``.

    Without ``--trace`` (a :class:`~megatron.dpp.trace.NullRecorder`) nothing is wrapped.
    """
    if not recorder.enabled:
        yield
        return
    trace = _StaticTrace(recorder)
    with (
        compat.patched(_FORWARD_STEP, trace.forward_step),
        compat.patched(_BACKWARD_STEP, trace.backward_step),
        compat.patched(_COMMUNICATE, trace.communicate),
    ):
        yield
