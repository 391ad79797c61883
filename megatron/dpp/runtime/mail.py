"""Mail: the messages of one rank in one iteration, with the labels that tell them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ProtocolError, TransferTimeout, setting
from megatron.dpp.runtime.links import Links
from megatron.dpp.schedule import Cause
from megatron.dpp.schedule.scheduler import Stall
from megatron.dpp.trace import Recorder

MOST_PENDING = 8
"""Pending sends of mean size from which a rank admits no new microbatch in an evaluation, where no
cap does.
"""

Tensors = torch.Tensor | list[torch.Tensor]
"""Content of one boundary per microbatch; a list if it is several tensors."""


class Mail:
    """Takes the inputs of tasks and puts their outputs.

    Args:
        links: the channels of this rank.
        recorder: records every message.
        iteration: number that every message of this iteration carries.
        timeout: seconds without any progress after which the rank gives up.
        backward_units: the microbatches in the order of their gradients; empty for their own order.
    """

    def __init__(
        self,
        links: Links,
        recorder: Recorder,
        iteration: int,
        timeout: float,
        backward_units: Sequence[int] = (),
    ) -> None:
        self._links, self._recorder = links, recorder
        self._transport = links.transport
        self._records = recorder.enabled
        self.incoming = links.incoming
        """Index of the channel of a task's input, by direction and chunk; None where it comes from
        no other rank.
        """
        self._look = links.transport.poll if links.whole else links.poll
        # Calls of torch here need nobody to look at them, as the stand-ins of CUDA do on a CPU.
        watched = torch._C._len_torch_function_stack() > 0
        self._unwatched: Any = torch._C.DisableTorchFunction if watched else contextlib.nullcontext
        self._iteration, self._timeout = iteration, timeout
        self._backward_units = backward_units
        self._kinds = {link.peer: link.kind for link in links.transport.links()}
        self._sources = {spec.source for spec in links.transport.incoming}
        self._before, self._taken = links.consumed, list(links.consumed)
        self._num_puts = self._put_bytes = 0
        self.arrived: Sequence[int] = ()
        """Microbatches per incoming channel at the last :meth:`poll`, of all iterations."""

    def poll(self) -> Sequence[int]:
        """:attr:`arrived`, as it is now."""
        self.arrived = arrived = self._look()
        return arrived

    def is_ahead(self, channel: int) -> bool:
        """True if the next input of a channel had not arrived at the last :meth:`poll`."""
        return self.arrived[channel] <= self._taken[channel]

    def take(self, channel: int, microbatch: int) -> Tensors:
        """The next input of a channel.

        Raises:
            ProtocolError: it is another one than that of this iteration and ``microbatch``.
        """
        self._taken[channel] += 1
        num_parts = self._links.tensors_in[channel]
        with self._unwatched():
            parts = range(num_parts)
            found = [self._take_part(channel, microbatch, part, num_parts) for part in parts]
        return found if num_parts > 1 else found[0]

    def _take_part(self, channel: int, microbatch: int, part: int, num_parts: int) -> torch.Tensor:
        message = self._transport.take(channel)
        if self._records:
            ahead = not message.arrived_ns
            if ahead:
                message = message._replace(arrived_ns=self._recorder.mark())
            self._recorder.taken(self._transport.incoming[channel], message, ahead=ahead)
        expected = (self._iteration, microbatch, part, num_parts)
        found = message[1:5]
        if found != expected:
            names = "iteration {}, microbatch {}, tensor {} of {}"
            raise ProtocolError(
                f"{self._transport.incoming[channel]}: expected {names.format(*expected)}, got "
                f"{names.format(*found)}; do all ranks run the same step?"
            )
        return message.tensor

    def put(
        self, direction: Direction, chunk: int, microbatch: int, result: Tensors | None
    ) -> bool:
        """Put a task's output into its channel; False at the end of the pipeline.

        Raises:
            TypeError: it is not as many tensors as were declared.
        """
        channel = self._links.outgoing(direction, chunk)
        if channel is None:
            return False
        num_parts = self._links.tensors_out[channel]
        tensors: list[Any] = result if isinstance(result, list) else [result]
        if len(tensors) != num_parts or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise TypeError(
                f"chunk {chunk} returned {', '.join(type(t).__name__ for t in tensors)} to its "
                f"neighbour; {num_parts} Tensor{'s' * (num_parts > 1)} declared (one, unless "
                "adjust_tensor_shapes_fn returns more shapes)"
            )
        labels = {"iteration": self._iteration, "microbatch": microbatch, "num_parts": num_parts}
        with self._unwatched():
            for part, tensor in enumerate(tensors):
                payload = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
                num_bytes = payload.nbytes
                if self._records:  # before the put, or a fast copy could arrive before it was sent
                    spec = self._transport.outgoing[channel]
                    self._recorder.put(spec, microbatch, num_bytes, self._kinds[spec.destination])
                self._num_puts += 1
                self._put_bytes += num_bytes
                self._transport.put(channel, payload, part=part, **labels)
        return True

    def is_full(self) -> bool:
        """More waits to leave than :data:`MOST_PENDING` mean messages, in two or more."""
        transport = self._transport
        if transport.pending() <= 1:
            return False
        return transport.pending_bytes() * self._num_puts > MOST_PENDING * self._put_bytes

    def check_senders(self, stall: Callable[[], Stall]) -> None:
        """Raise if a message that a stalled rank misses is of a rank that has closed its links.

        Raises:
            PeerDead: names the message.
        """
        if not (left := set(filter(self._transport.departed, self._sources))):
            return
        arrived = self.poll()  # after the look at the peer: its last message is in it
        for way, chunk in stall().channels:
            index = self.incoming(way, chunk)
            if index is None or self._transport.incoming[index].source not in left:
                continue
            if arrived[index] <= self._taken[index]:
                number = self._taken[index] - self._before[index]
                if way is Direction.BACKWARD and self._backward_units:
                    number = self._backward_units[number]
                raise self._transport.overdue(
                    index, 0.0, iteration=self._iteration, microbatch=number
                )

    def stalled(self, stall: Stall, *, followed: bool) -> TransferTimeout:
        """The error for a rank that could run nothing until the timeout.

        Args:
            followed: a leader decides for this rank.
        """
        begin = (
            f"rank {self._transport.rank} could run nothing for {self._timeout:g} s in iteration "
            f"{self._iteration} ({stall.text})"
        )
        channels = [self.incoming(way, chunk) for way, chunk in stall.channels]
        specs = {
            f"{self._transport.incoming[index]}{self._transport.brought(index)}"
            for index in channels
            if index is not None
        }
        sources: Sequence[str] = sorted(specs) or ["the leader of this stage"]
        either = (
            ", or the policy waits for messages that its neighbours do not send either"
            if stall.cause is Cause.POLICY and not followed
            else ""
        )
        if found := self._transport.trouble():
            return TransferTimeout(f"{begin}; missing from: {', '.join(sources)}. {found}")
        timeout = setting("timeout")
        return TransferTimeout(
            f"{begin}; missing from: {', '.join(sources)}. Every peer's process is alive: one is "
            f"stopped or stuck, or slower than {timeout} allows{either}",
            timeout,
        )
