"""Kind ``dist``: ``torch.distributed`` send and receive over gloo. Slow and simple; the reference
that the other kinds must equal.

Every pair of ranks gets a two-rank gloo group of its own over the job's store, so neither a default
process group nor the other ranks take part. One thread per channel and end does the blocking calls:
gloo's receive cannot be polled. CUDA tensors are staged through the CPU.

A message is one buffer of the channel's fixed size: a line of JSON, padded, then the payload.
"""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from megatron.dpp.errors import (
    PeerDead,
    ProtocolError,
    SetupError,
    one_line,
)
from megatron.dpp.transport import handshake
from megatron.dpp.transport.base import ChannelSpec, LinkInfo, Message, check_payload
from megatron.dpp.transport.joining import Request
from megatron.dpp.transport.kinds import AUTO, TransportKind, register
from megatron.dpp.transport.options import TransportOptions
from megatron.dpp.transport.threaded import ThreadedTransport

_HEADER_BYTES = 512
_NUM_LABELS = 5
CLOSE_SECONDS = 5.0
"""Time in which a channel's two ends are closed; each side waits half of it."""
_SILENCE = timedelta(days=365)
"""A channel may be silent for long: the caller of ``wait`` has a deadline of its own."""


class _Incoming:
    """Receives one channel in a thread; keeps at most ``depth`` messages."""

    def __init__(self, owner: DistTransport, spec: ChannelSpec, group: Any, peer: int, tag: int):
        self.spec = spec
        self.messages: deque[tuple[torch.Tensor, int]] = deque()
        self.num_arrived = 0
        self.credit = threading.Semaphore(spec.depth)
        self._owner, self._group, self._peer, self._tag = owner, group, peer, tag
        self.thread = threading.Thread(
            target=self._run, name=f"dpp-dist-in-{spec.source}-{tag}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                self.credit.acquire()
                buffer = torch.empty(_HEADER_BYTES + self.spec.slot_bytes, dtype=torch.uint8)
                self._group.recv([buffer], self._peer, self._tag).wait(_SILENCE)
                if buffer[0] == 0:
                    self._owner.note_end(self.spec)
                    return
                with self._owner.changed:
                    self.messages.append((buffer, time.monotonic_ns()))
                    self.num_arrived += 1
                self._owner.ring()
        except RuntimeError as error:
            self._owner.fail_link(self.spec, error)


class _Outgoing:
    """Sends one channel in a thread, in order."""

    def __init__(self, owner: DistTransport, spec: ChannelSpec, group: Any, peer: int, tag: int):
        self.spec = spec
        self.puts: queue.Queue[tuple[bytes, torch.Tensor] | None] = queue.Queue()
        self.num_pending = self.pending_bytes = 0
        self._owner, self._group, self._peer, self._tag = owner, group, peer, tag
        self.thread = threading.Thread(
            target=self._run, name=f"dpp-dist-out-{spec.destination}-{tag}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        buffer = torch.zeros(_HEADER_BYTES + self.spec.slot_bytes, dtype=torch.uint8)
        try:
            while (item := self.puts.get()) is not None:
                header, payload = item
                buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                if payload.nbytes:
                    flat = payload.reshape(-1).view(torch.uint8)
                    buffer[_HEADER_BYTES : _HEADER_BYTES + payload.nbytes].copy_(flat)
                self._group.send([buffer], self._peer, self._tag).wait(_SILENCE)
                with self._owner.changed:
                    self.num_pending -= 1
                    self.pending_bytes -= payload.nbytes
                self._owner.ring()
            buffer[0] = 0
            self._group.send([buffer], self._peer, self._tag).wait(_SILENCE)
        except RuntimeError as error:
            self._owner.fail_link(self.spec, error)


class DistTransport(ThreadedTransport):
    """One rank's channels over gloo."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._ended: set[ChannelSpec] = set()
        self._bell: Any = None  # a native transport without channels
        if request.board_ranks:
            from megatron.dpp.transport.opening import open_native

            without_channels = dataclasses.replace(request, channels=())
            self._bell = open_native(without_channels, AUTO)
            self.board = self._bell.board
        try:
            self._groups = self._connect(request.store, request.options)
        except BaseException:
            if self._bell:
                self._bell.close()
            raise
        self._incoming = [
            _Incoming(self, spec, *self._address(spec, spec.source)) for spec in self.incoming
        ]
        self._outgoing = [
            _Outgoing(self, spec, *self._address(spec, spec.destination)) for spec in self.outgoing
        ]

    def _connect(self, store: Store, options: TransportOptions) -> dict[int, Any]:
        try:
            opened = store.add(f"dpp/{options.name}/dist/opened/{self.rank}", 1)
        except (RuntimeError, ValueError) as error:  # ValueError: others wrote something else there
            raise SetupError(
                f"rank {self.rank}: the store does not count transports: {one_line(error, 200)}"
            ) from error
        peers = {spec.source for spec in self.incoming} | {s.destination for s in self.outgoing}
        groups = {}
        for peer in sorted(peers):
            pair = sorted((self.rank, peer))
            prefix = f"dpp/{options.name}/dist/{opened}/{pair[0]}-{pair[1]}"
            try:
                groups[peer] = ProcessGroupGloo(
                    PrefixStore(prefix, store),
                    pair.index(self.rank),
                    2,
                    timedelta(seconds=options.setup_timeout),
                )
            except RuntimeError as error:
                raise SetupError(
                    f"rank {self.rank}: no gloo connection with rank {peer}: {error}"
                ) from error
        return groups

    def _address(self, spec: ChannelSpec, peer: int) -> tuple[Any, int, int]:
        tag = 2 * spec.chunk + spec.direction
        return self._groups[peer], int(peer > self.rank), tag

    # Called by the threads.

    def ring(self) -> None:
        super().ring()
        if self._bell:
            self._bell.ring()

    def note_end(self, spec: ChannelSpec) -> None:
        """The sender of an incoming channel said that it closes."""
        with self.changed:
            self._ended.add(spec)
        self.ring()

    def fail_link(self, spec: ChannelSpec, error: RuntimeError) -> None:
        """gloo gave up on a link: its process ended, or its peer closes."""
        peer = spec.destination if spec.source == self.rank else spec.source
        with self.changed:
            if any(ended.source == peer for ended in self._ended):
                self._ended.add(spec)
            elif not self._closed and self._failure is None:
                text = one_line(RuntimeError(str(error).partition("\n")[0]))
                self._failure = PeerDead(f"rank {self.rank}: rank {peer} is gone ({spec}): {text}")
        self.ring()

    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        self._check()
        out = self._outgoing[channel]
        check_payload(tensor, out.spec)
        labels = [iteration, microbatch, part, num_parts, time.monotonic_ns()]
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = json.dumps({"labels": labels, "dtype": dtype, "shape": list(tensor.shape)})
        with self.changed:
            out.num_pending += 1
            out.pending_bytes += tensor.nbytes
        out.puts.put((header.encode().ljust(_HEADER_BYTES), tensor.detach().to("cpu")))

    def take(self, channel: int) -> Message:
        self._check()
        source = self._incoming[channel]
        with self.changed:
            if not source.messages:
                raise IndexError(f"rank {self.rank}: nothing has arrived on {source.spec}")
            buffer, arrived_ns = source.messages.popleft()
        source.credit.release()
        try:
            header = handshake.read_object(bytes(buffer[:_HEADER_BYTES].tolist()))
            iteration, microbatch, part, num_parts, sent_ns = _labels(header)
            payload = _payload(buffer, header, source.spec.slot_bytes)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # RecursionError, too
            self._failure = ProtocolError(
                f"rank {self.rank}: broken header on {source.spec}: {one_line(error, 200)}"
            )
            raise self._failure from error
        tensor = payload.to(self._device)
        return Message(tensor, iteration, microbatch, part, num_parts, sent_ns, arrived_ns)

    def wait(self, seconds: float) -> bool:
        if not self._bell:
            return super().wait(seconds)
        self._check()
        # The bell covers the board too; arrivals ring it as well.
        changed = self._seen != self._version or self._bell.wait(seconds)
        self._bell.poll()
        self._check()
        return changed

    def links(self) -> Sequence[LinkInfo]:
        return [
            LinkInfo(peer, "dist", "asked for: torch.distributed over gloo")
            for peer in self._groups
        ]

    def departed(self, peer: int) -> bool:
        """True if ``peer`` has ended all channels that come from it.

        Messages of one channel may arrive later than the end of another.
        """
        coming = {spec for spec in self.incoming if spec.source == peer}
        return bool(coming) and coming <= self._ended

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS / 2
        for out in self._outgoing:
            out.puts.put(None)
        for channel in self._incoming:
            channel.credit.release()
        threads = [out.thread for out in self._outgoing]
        threads += [channel.thread for channel in self._incoming]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A thread that still waits for a peer is a daemon and ends with the group's sockets or the
        # process.
        self._groups.clear()
        if self._bell:
            self._bell.close()


def _labels(header: dict[str, Any]) -> list[int]:
    """Iteration, microbatch, part, number of parts and sending time of a header from a peer."""
    labels = header["labels"]
    if not isinstance(labels, list) or len(labels) != _NUM_LABELS or not _are_int64(labels):
        raise ValueError(f"labels are {str(labels)[:80]}")
    if not 0 <= labels[2] < labels[3]:
        raise ValueError(f"part {labels[2]} of {labels[3]}")
    return labels


def _payload(buffer: torch.Tensor, header: dict[str, Any], most_bytes: int) -> torch.Tensor:
    """The tensor behind a header from a peer."""
    name, shape = str(header["dtype"]), header["shape"]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantized: not only bytes
        raise ValueError(f"dtype is {name[:80]!r}")
    if not isinstance(shape, list) or not _are_int64(shape) or min(shape, default=0) < 0:
        raise ValueError(f"shape is {str(shape)[:80]}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > most_bytes:  # before memory is asked for
        raise ValueError(f"shape {shape} needs more than a slot's {most_bytes} bytes")
    body = buffer[_HEADER_BYTES : _HEADER_BYTES + num_bytes].clone()
    return body.view(dtype).view(shape)


def _are_int64(values: list[Any]) -> bool:
    return all(type(value) is int and -(1 << 63) <= value < 1 << 63 for value in values)


register(TransportKind(name="dist", open=DistTransport, between_hosts=True))
