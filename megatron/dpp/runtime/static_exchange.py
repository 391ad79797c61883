"""megatron-core's static schedules over the project's channels, slowed down and traced.

The static schedules call the module-level ``forward_step`` and ``backward_step`` of
``megatron.core.pipeline_parallel.schedules`` and exchange tensors through
``P2PCommunicator._communicate``. For the length of a ``with`` block :func:`around_steps` wraps the
former two, :func:`over_channels` replaces the latter, and :func:`traced` records all three.
``runtime.static`` is the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.expert_trace import traced_experts
from megatron.dpp.runtime.links import await_message
from megatron.dpp.trace import IdleCause, Recorder
from megatron.dpp.transport.base import ChannelSpec, Direction, Transport

_COMMUNICATE = "pipeline_parallel.p2p_communication:P2PCommunicator._communicate"


class Step(NamedTuple):
    """One F or B of a static schedule."""

    kind: str
    chunk: int
    microbatch: int


@contextlib.contextmanager
def around_steps(
    before: Callable[[Step, Any], None], after: Callable[[Step, Any], None]
) -> Iterator[None]:
    """Call ``before(step, received)`` and ``after(step, result)`` around each F and B of one
    schedule call, with the tensors that come from and go to the neighbours.
    """
    made: dict[int, Step] = {}

    def forward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = Step("F", kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0)
        before(step, _first(kwargs["input_tensor"] if "input_tensor" in kwargs else args[4]))
        result = original(*args, **kwargs)
        output = _first(result[0])
        made[id(output)] = step
        after(step, output)
        return result

    def backward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _, output, gradient = args[:3]
        _, *task = made.pop(id(_first(output)), Step("F", 0, 0))
        step = Step("B", *task)
        before(step, _first(gradient))
        result = original(*args, **kwargs)
        after(step, _first(result))
        return result

    with (
        compat.patched("pipeline_parallel.schedules:forward_step", forward_step),
        compat.patched("pipeline_parallel.schedules:backward_step", backward_step),
    ):
        yield


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors


def ring_channels(
    ranks: tuple[int, ...], rank: int, slot_bytes: int, depth: int
) -> list[ChannelSpec]:
    """The channels of one rank of a static schedule: one per neighbour and direction.

    A static schedule sends and receives in one fixed order, so all chunks share a channel (their
    ``chunk`` is 0), and the last rank is a neighbour of the first.
    """
    specs = set()
    for here, there in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
        if ranks[rank] in (here, there):
            specs.add(ChannelSpec(here, there, 0, Direction.FORWARD, slot_bytes, depth))
            specs.add(ChannelSpec(there, here, 0, Direction.BACKWARD, slot_bytes, depth))
    return sorted(specs, key=lambda spec: (spec.source, spec.destination, spec.direction))


_SENDS = {"send_next": Direction.FORWARD, "send_prev": Direction.BACKWARD}
_RECEIVES = {"recv_prev": Direction.FORWARD, "recv_next": Direction.BACKWARD}
"""The names of ``_communicate`` for its transfers."""


class ChannelExchange:
    """``P2PCommunicator._communicate`` over a transport opened with :func:`ring_channels`.

    Args:
        transport: opened by the caller, and closed by it.
        timeout: seconds to wait for a message.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self._timeout = transport, timeout
        self._out = {spec.direction: i for i, spec in enumerate(transport.outgoing)}
        self._in = {spec.direction: i for i, spec in enumerate(transport.incoming)}
        self._num_sent = dict.fromkeys(Direction, 0)
        self._num_taken = dict.fromkeys(Direction, 0)

    def communicate(self, communicator: Any, **asked: Any) -> Any:
        """Run up to two sends and two receives; returns handles if asked not to wait."""
        sent = [name for name in _SENDS if asked[f"tensor_{name}"] is not None]
        for name in sent:
            self._put(_SENDS[name], asked[f"tensor_{name}"])
        received: dict[str, Any] = dict.fromkeys(_RECEIVES)
        wanted = [name for name in _RECEIVES if asked[name]]
        if asked.get("wait_on_reqs", True):
            for name in wanted:
                received[name] = self.take(_RECEIVES[name]).requires_grad_()
            return *received.values(), None
        handles = {name: SimpleNamespace(wait=lambda: None) for name in sent}
        for name in wanted:
            received[name] = buffer = _empty(communicator.config.pipeline_dtype)
            handles[name] = SimpleNamespace(wait=partial(self._fill, buffer, _RECEIVES[name]))
        return *received.values(), handles

    def _fill(self, buffer: torch.Tensor, way: Direction) -> None:
        buffer.data = self.take(way)

    def _put(self, way: Direction, tensor: torch.Tensor) -> None:
        number = self._num_sent[way]
        self._num_sent[way] += 1
        payload = tensor.detach().contiguous()
        self.transport.put(self._out[way], payload, iteration=0, microbatch=number)

    def take(self, way: Direction) -> torch.Tensor:
        """The next message that comes from this side.

        Raises:
            PeerDead: its sender has left.
            TransferTimeout: it did not come in time.
        """
        channel, number = self._in[way], self._num_taken[way]
        await_message(self.transport, channel, number, self._timeout, 0, number)
        self._num_taken[way] += 1
        return self.transport.take(channel).tensor

    def finish(self) -> None:
        """Wait until everything that was put has left, at the end of a step."""
        self.transport.flush(self._timeout)


def _empty(dtype: torch.dtype) -> torch.Tensor:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


@contextlib.contextmanager
def over_channels(exchange: ChannelExchange) -> Iterator[None]:
    """Send megatron-core's P2P messages over ``exchange`` while the block runs."""
    with compat.patched(_COMMUNICATE, lambda original, own, **k: exchange.communicate(own, **k)):
        yield
        exchange.finish()


@contextlib.contextmanager
def traced(recorder: Recorder, chunks: Sequence[torch.nn.Module] = ()) -> Iterator[None]:
    """Record the tasks, waits and messages of one static schedule call, and the experts of these
    model chunks, in the recorder's current iteration; with a
    :class:`~megatron.dpp.trace.NullRecorder` nothing is wrapped.
    """
    if not recorder.enabled:
        yield
        return
    trace = _Trace(recorder)
    with (
        around_steps(trace.before, trace.after),
        compat.patched(_COMMUNICATE, trace.communicate),
        traced_experts(chunks, recorder),
    ):
        yield


class _Trace:
    """The record of one schedule call.

    Tensors are recognised by identity: a result of a step is what is sent, and a received tensor is
    what a later step gets. So a message's chunk and microbatch are known when it is used, and its
    arrival is recorded then, with the time at which the wait for it ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[int, Step] = {}
        self._received: dict[int, tuple[torch.Tensor, int, Any]] = {}
        """Tensor, sender and arrival of each message that no step has used yet."""
        self._tasks_run = 0

    def before(self, step: Step, received: Any) -> None:
        """Record the arrival of a step's input, and its beginning."""
        tensor, peer, arrived = self._received.pop(id(received), (None, 0, None))
        if tensor is not None:
            way = Direction.FORWARD if step.kind == "F" else Direction.BACKWARD
            channel = ChannelSpec(peer, torch.distributed.get_rank(), step.chunk, way, 0)
            arrival = SimpleNamespace(
                tensor=tensor, arrived_ns=arrived, sent_ns=None,
                iteration=self._recorder.iteration, microbatch=step.microbatch,
            )  # fmt: skip
            self._recorder.taken(channel, arrival)
        self._recorder.begin_task(*step)

    def after(self, step: Step, result: Any) -> None:
        """Record a step's end."""
        self._recorder.end_task()
        self._tasks_run += 1
        if isinstance(result, torch.Tensor):
            self._made[id(result)] = step

    def communicate(self, original: Callable[..., Any], communicator: Any, **kwargs: Any) -> Any:
        """``P2PCommunicator._communicate`` with its sends and receives recorded."""
        for name, way in _SENDS.items():
            self._sent(kwargs[f"tensor_{name}"], communicator, way)
        waits = kwargs.get("wait_on_reqs", True)
        start = self._recorder.mark() if waits else None
        previous, following, handles = original(communicator, **kwargs)
        tensors = {"recv_prev": previous, "recv_next": following}
        if waits:
            received = {way: tensors[name] for name, way in _RECEIVES.items() if kwargs[name]}
            self._waited(start, received, communicator)
        else:
            for name in _RECEIVES.keys() & handles.keys():
                arriving = {_RECEIVES[name]: tensors[name]}
                wait = partial(self._timed, handles[name].wait, arriving, communicator)
                handles[name] = SimpleNamespace(wait=wait)
        return previous, following, handles

    def _timed(
        self, wait: Callable[[], Any], received: dict[Direction, Any], communicator: Any
    ) -> Any:
        start = self._recorder.mark()
        result = wait()
        self._waited(start, received, communicator)
        return result

    def _waited(self, start: Any, received: dict[Direction, Any], communicator: Any) -> None:
        """Record a wait that ends now, and keep what it received."""
        end, cause, detail = self._recorder.mark(), IdleCause.SEND, ""
        if received:
            cause = IdleCause.MESSAGE if self._tasks_run else IdleCause.WARM_UP
            detail = next(iter(received)).name.lower()
        self._recorder.gap(start, end, cause, detail)
        for way, tensor in received.items():
            forward = way is Direction.FORWARD
            peer = communicator.prev_rank if forward else communicator.next_rank
            self._received[id(tensor)] = (tensor, peer or 0, end)

    def _sent(self, tensor: Any, communicator: Any, way: Direction) -> None:
        step = self._made.get(id(tensor))
        if tensor is None or step is None:
            return
        group, forward = communicator.pp_group, way is Direction.FORWARD
        wraps = group.rank() == (group.size() - 1 if forward else 0)
        chunk = step.chunk + (1 if forward else -1) * wraps
        peer = communicator.next_rank if forward else communicator.prev_rank
        channel = ChannelSpec(torch.distributed.get_rank(), peer or 0, chunk, way, 0)
        self._recorder.put(channel, step.microbatch, tensor.nbytes, "p2p")
