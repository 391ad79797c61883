"""megatron-core's static schedules, unmodified, over our channels and with injected variability.

So that a difference in speed or numbers can be assigned to the schedule or to the transport, the
two are exchanged one at a time: ``over_channels`` lets the static schedules' ``P2PCommunicator``
put and take on a transport of ours, and ``prolonged`` makes their steps as slow as ``--dpp-inject``
makes the dynamic schedule's. Both replace private names of megatron-core 0.16.1 for the length of a
``with`` block. ``runtime.static`` is the caller.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.mcore import compat
from megatron.dpp.transport.base import ChannelSpec, Direction, Transport

_FORWARD_STEP = "pipeline_parallel.schedules:forward_step"
_BACKWARD_STEP = "pipeline_parallel.schedules:backward_step"
_COMMUNICATE = "pipeline_parallel.p2p_communication:P2PCommunicator._communicate"
_NAP_SECONDS = 0.05


def ring_channels(
    ranks: tuple[int, ...], rank: int, slot_bytes: int, depth: int
) -> list[ChannelSpec]:
    """The channels of one rank of a static schedule: one per neighbour and direction.

    A static schedule sends and receives in one fixed order, so all chunks share a channel (their
    ``chunk`` is 0), and the last rank is a neighbour of the first.
    """
    size = len(ranks)
    specs = set()
    for here in range(size):
        there = (here + 1) % size
        for way, ends in (
            (Direction.FORWARD, (here, there)),
            (Direction.BACKWARD, (there, here)),
        ):
            if rank in ends:
                specs.add(ChannelSpec(ranks[ends[0]], ranks[ends[1]], 0, way, slot_bytes, depth))
    return sorted(specs, key=lambda spec: (spec.source, spec.destination, spec.direction))


class _Receive:
    """Stands for the handle of a receive: ``wait`` fills the buffer that was returned before."""

    def __init__(self, exchange: ChannelExchange, direction: Direction, buffer: Any) -> None:
        self._exchange, self._direction, self._buffer = exchange, direction, buffer

    def wait(self) -> None:
        self._buffer.data = self._exchange.take(self._direction)


class _Sent:
    """Stands for the handle of a send, which the transport finishes by itself."""

    def wait(self) -> None:
        pass


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
        """Two sends and two receives, each of which may be absent; handles if asked not to wait."""
        for name, way in (
            ("tensor_send_next", Direction.FORWARD),
            ("tensor_send_prev", Direction.BACKWARD),
        ):
            if asked[name] is not None:
                self._put(way, asked[name])
        waited = asked.get("wait_on_reqs", True)
        received: list[Any] = []
        handles: dict[str, Any] = {}
        for name, way in (("recv_prev", Direction.FORWARD), ("recv_next", Direction.BACKWARD)):
            if not asked[name]:
                received.append(None)
                continue
            buffer = self._buffer(communicator, waited, way)
            received.append(buffer)
            if not waited:
                handles[name] = _Receive(self, way, buffer)
        if not waited:
            for name in ("send_next", "send_prev"):
                if asked[f"tensor_{name}"] is not None:
                    handles[name] = _Sent()
        return received[0], received[1], None if waited else handles

    def _buffer(self, communicator: Any, waited: bool, way: Direction) -> torch.Tensor:
        if waited:
            return self.take(way).requires_grad_()
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        dtype = communicator.config.pipeline_dtype
        return torch.empty(0, dtype=dtype, device=device, requires_grad=True)

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
        channel, end = self._in[way], time.monotonic() + self._timeout
        spec, number = self.transport.incoming[channel], self._num_taken[way]
        while self.transport.poll()[channel] <= number:
            left = self.transport.departed(spec.source)
            if left and self.transport.poll()[channel] <= number:  # nor is it in the last look
                raise PeerDead(
                    f"{spec}: message {number} will not arrive: rank {spec.source} has closed its "
                    "transport"
                )
            if time.monotonic() > end:
                raise TransferTimeout(
                    f"{spec}: message {number} did not arrive within {self._timeout:g} s "
                    "(--dpp-timeout); its sender is alive"
                )
            self.transport.wait(_NAP_SECONDS)
        self._num_taken[way] += 1
        return self.transport.take(channel).tensor

    def finish(self) -> None:
        """At the end of a step: everything that was put has left."""
        self.transport.flush(self._timeout)


@contextlib.contextmanager
def over_channels(exchange: ChannelExchange) -> Iterator[None]:
    """megatron-core's P2P exchange goes over ``exchange`` while the block runs."""
    with compat.patched(_COMMUNICATE, lambda original, own, **k: exchange.communicate(own, **k)):
        yield
        exchange.finish()


@contextlib.contextmanager
def around_steps(
    before: Callable[[], None], after: Callable[[str, int, int], None]
) -> Iterator[None]:
    """``before()`` and ``after(kind, chunk, microbatch)`` run around each ``F`` and ``B``."""
    made: dict[int, tuple[int, int]] = {}

    def forward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = (kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0)
        before()
        result = original(*args, **kwargs)
        made[id(result[0])] = task
        after("F", *task)
        return result

    def backward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = made.pop(id(args[1]), (0, 0))
        before()
        result = original(*args, **kwargs)
        after("B", *task)
        return result

    with (
        compat.patched(_FORWARD_STEP, forward_step),
        compat.patched(_BACKWARD_STEP, backward_step),
    ):
        yield
