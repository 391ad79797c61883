"""Kind ``nixl``: NVIDIA's NIXL, over UCX, writes messages into slots of the receiver.

NIXL moves bytes. It has no channels, no credit, no notice of dead peers, and nothing to sleep on.
A native transport of small channels, the *control*, has all of these. It also finds and
authenticates the peers, and carries the addresses of slots:

    put -> queue -(copy)-> send slot -(NIXL)-> slot of the receiver -(take)-> tensor
                           announcement -(control)-> arrived
                                        <-(control)- credit

One thread per rank makes all calls to NIXL and, except ``abort`` and the board's, to the control.
CUDA tensors pass through the host's memory.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.dpp.config import missing_part
from megatron.dpp.errors import (
    ProtocolError,
    SetupError,
    TransportError,
    TransportUnavailable,
    one_line,
)
from megatron.dpp.transport.base import (
    OPENED,
    ChannelSpec,
    LinkInfo,
    Message,
    Transport,
    check_payload,
)
from megatron.dpp.transport.joining import Request
from megatron.dpp.transport.kinds import AUTO, TransportKind
from megatron.dpp.transport.native import Abandon, NativeTransport, load_native
from megatron.dpp.transport.nixl_agent import NixlAgent, Slots, keep_for_ever

_NAME = "nixl"
_NOTE_BYTES = 1 << 16
"""Slot of a control channel, for an offer, or for an announcement's fields and shape."""
_NUM_FIELDS, _MOST_DIMENSIONS = 3, 8
_IDLE_SECONDS, _LONGEST_NAP = 0.5, 1e-3
_DRAIN_SECONDS, _JOIN_SECONDS = 1.5, 2.0
"""What is left of the 5 s of ``close`` is the control's."""


@dataclass
class _Incoming:
    """A channel from a peer; the counts are of messages."""

    spec: ChannelSpec
    announced: deque[Message] = field(default_factory=deque)
    num_taken: int = 0
    num_credited: int = 0

    @property
    def num_arrived(self) -> int:
        """Messages that were announced so far."""
        return self.num_taken + len(self.announced)


@dataclass
class _Put:
    """A message on its way. ``note``: sending time, dtype, checksum or -1, shape."""

    tensor: torch.Tensor
    note: list[int]
    labels: dict[str, int]
    began: float = 0.0
    write: int | None = None


@dataclass
class _Outgoing:
    """A channel to a peer. ``agent``, ``address`` and ``stride`` are of the peer's slots."""

    spec: ChannelSpec
    agent: str = ""
    address: int = 0
    stride: int = 0
    waiting: deque[_Put] = field(default_factory=deque)
    written: deque[_Put] = field(default_factory=deque)
    num_begun: int = 0
    num_written: int = 0
    num_released: int = 0
    broken: bool = False
    """The receiver has left; what is pending stays so."""

    @property
    def pending(self) -> list[_Put]:
        """The messages whose write is not done."""
        return [*self.written, *self.waiting]


class NixlTransport(Transport):
    """One rank's channels over NIXL.

    The thread holds ``_changed`` while it changes what the caller reads, and rings afterwards.
    """

    def __init__(self, request: Request) -> None:
        if missing := missing_part(_NAME):
            raise TransportUnavailable(missing)
        self.rank = request.rank
        self.outgoing, self.incoming = request.outgoing, request.incoming
        self._changed = threading.Condition()
        self._device = request.device
        self._seen = self._version = 0
        self._failure: TransportError | None = None
        self._closed = False
        self._checksum = request.options.checksum
        self._dtypes = [getattr(torch, name, None) for name in load_native().dtype_names]
        self._incoming = [_Incoming(spec) for spec in self.incoming]
        self._outgoing = [_Outgoing(spec) for spec in self.outgoing]
        self._departed: set[int] = set()
        self._peers = {spec.source for spec in self.incoming}
        self._peers |= {spec.destination for spec in self.outgoing}
        self._drained_at = math.inf
        self._pid = os.getpid()
        self._memory = contextlib.ExitStack()  # gives it back
        self._control = _open_control(request)
        self.board = self._control.board
        try:
            self._join(request)
        except BaseException as error:
            self._control.abort(f"{type(error).__name__}: {error}")
            self._control.close()
            self._memory.close()
            raise
        self._thread = threading.Thread(target=self._run, name="dpp-nixl", daemon=True)
        self._thread.start()
        seconds = request.options.abandon_after
        self._abandon = Abandon(lambda: str(self._failure or ""), self.rank, seconds)
        atexit.register(self.close)  # the thread must not outlive the interpreter
        OPENED.add(self)

    def _join(self, request: Request) -> None:
        try:
            self._exchange_slots(request)
        except TransportError:
            raise
        except Exception as error:
            self._control.raise_failure()  # a peer may have died meanwhile
            raise SetupError(f"rank {self.rank}: NIXL: {one_line(error)}") from error

    def _exchange_slots(self, request: Request) -> None:
        """Make our slots, offer them to the peers, and learn theirs."""
        self._receive_slots = Slots(self.rank, self.incoming)
        self._memory.callback(self._receive_slots.close)
        self._send_slots = Slots(self.rank, self.outgoing)
        self._memory.callback(self._send_slots.close)
        name = f"{self.rank}-{secrets.token_hex(8)}"
        self._agent = NixlAgent(name, (self._receive_slots, self._send_slots))
        description = self._agent.description()
        for index, stride in enumerate(self._receive_slots.strides):
            address = self._receive_slots.slot(index, 0, 1).data_ptr()
            offer = json.dumps({"agent": description, "address": address, "stride": stride})
            note = torch.frombuffer(bytearray(offer, "ascii"), dtype=torch.uint8)
            self._control.put(len(self.outgoing) + index, note, iteration=0, microbatch=0)
        deadline = time.monotonic() + request.options.setup_timeout
        agents: dict[int, str] = {}
        for index, out in enumerate(self._outgoing):
            theirs, peer = self._receive_offer(index, deadline), out.spec.destination
            if peer not in agents:
                agents[peer] = self._agent.connect(theirs["agent"])
            out.agent, out.address, out.stride = agents[peer], theirs["address"], theirs["stride"]

    def _receive_offer(self, index: int, deadline: float) -> dict[str, Any]:
        control, channel = self._control, len(self.incoming) + index
        while not control.poll()[channel]:
            if not control.wait(max(0.0, deadline - time.monotonic())):
                raise SetupError(
                    f"rank {self.rank}: rank {self.outgoing[index].destination} has offered no "
                    "slots of NIXL in time"
                )
        offer: dict[str, Any] = json.loads(bytes(control.take(channel).tensor.tolist()))
        return offer

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closed or self._is_draining():
                # In this order: what a peer sent before it left counts as arrived when it has left.
                left = {peer for peer in self._peers if self._control.departed(peer)}
                changed = self._hear(self._control.poll()) or left != self._departed
                self._departed = left
                nap = _IDLE_SECONDS
                for index, out in enumerate(self._outgoing):
                    changed |= self._advance(index, out)
                    if out.written:  # looks again after an eighth of the time that it takes
                        taken = time.monotonic() - out.written[0].began
                        nap = min(nap, _LONGEST_NAP, taken / 8)
                if changed or self.board:
                    self._ring()
                self._control.wait(nap)
        except TransportError as error:
            self._fail(error)
        except Exception as error:
            self._fail(TransportError(f"rank {self.rank}: NIXL: {one_line(error)}"))

    def _is_draining(self) -> bool:
        """True while a closed transport has puts to present peers, and time."""
        if time.monotonic() >= self._drained_at:
            return False
        return any(
            out.written or out.waiting
            for out in self._outgoing
            if not out.broken and out.spec.destination not in self._departed
        )

    def _hear(self, arrived: Sequence[int]) -> bool:
        """Take announcements and credit, and give credit; true if a caller should look."""
        changed = False
        for index, (source, total) in enumerate(zip(self._incoming, arrived, strict=False)):
            with self._changed:  # a take changes both counts of what has arrived
                while source.num_arrived < total:
                    source.announced.append(self._control.take(index))
                    changed = True
            while source.num_credited < source.num_taken:
                channel = len(self._outgoing) + index
                self._control.put(channel, torch.empty(0), iteration=0, microbatch=0)
                source.num_credited += 1
        first = len(self._incoming)
        for index, out in enumerate(self._outgoing, first):
            while out.num_released + 1 < arrived[index]:  # the first one was an offer
                self._control.take(index)
                out.num_released += 1
        return changed

    def _advance(self, index: int, out: _Outgoing) -> bool:
        """Begin writes that have a slot, and announce those that are done; true if one was."""
        num_written = out.num_written
        if out.broken:
            return False
        try:
            while out.waiting and out.num_begun - out.num_released < out.spec.depth:
                self._begin(index, out)
            while out.written:
                write = out.written[0].write
                if write is not None and not self._agent.is_written(write):
                    break
                self._announce(index, out)
        except TransportError:
            raise
        except Exception as error:
            self._explain(out, error)
        return out.num_written != num_written

    def _begin(self, index: int, out: _Outgoing) -> None:
        put, index_of_slot = out.waiting[0], out.num_begun % out.spec.depth
        num_bytes = put.tensor.nbytes
        source = self._send_slots.slot(index, out.num_begun, num_bytes)
        put.began = time.monotonic()
        if num_bytes:
            source.copy_(put.tensor.reshape(-1).view(torch.uint8))
        if self._checksum:
            put.note[2] = zlib.crc32(source.numpy().data)
        if num_bytes:
            address = out.address + index_of_slot * out.stride
            put.write = self._agent.write(source, out.agent, address)
        with self._changed:
            out.written.append(out.waiting.popleft())
        out.num_begun += 1

    def _announce(self, index: int, out: _Outgoing) -> None:
        put = out.written[0]
        self._control.put(index, torch.tensor(put.note), **put.labels)
        with self._changed:
            out.written.popleft()
            out.num_written += 1

    def _explain(self, out: _Outgoing, error: Exception) -> None:
        """Raise the control's reason for an error of NIXL. None is needed for a peer that left."""
        peer = out.spec.destination
        self._control.raise_failure()
        if not self._control.departed(peer):
            raise TransportError(
                f"rank {self.rank}: NIXL cannot write to rank {peer}, which is alive "
                f"({out.spec}): {one_line(error)}"
            ) from error
        out.broken = True

    def _fail(self, error: TransportError) -> None:
        with self._changed:
            self._failure = self._failure or error
        self._control.abort(str(error))  # unless it is the control's own failure
        self._ring()

    def _ring(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    # The caller's thread.

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._control.check()

    def poll(self) -> Sequence[int]:
        self._check()
        with self._changed:
            self._seen = self._version
            return [source.num_arrived for source in self._incoming]

    def wait(self, seconds: float) -> bool:
        self._check()
        with self._changed:
            changed = self._changed.wait_for(lambda: self._seen != self._version, seconds)
        self._check()
        return changed

    def pending(self) -> int:
        self._check()
        with self._changed:
            return sum(len(out.pending) for out in self._outgoing)

    def pending_bytes(self) -> int:
        with self._changed:
            return sum(put.tensor.nbytes for out in self._outgoing for put in out.pending)

    def _has_unsent(self, channel: int) -> bool:
        return bool(self._outgoing[channel].pending)

    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        self._check()
        out = self._outgoing[channel]
        check_payload(tensor, out.spec)
        if tensor.dtype not in self._dtypes or tensor.dim() > _MOST_DIMENSIONS:
            raise ValueError(
                f"{out.spec}: cannot send {tensor.dtype} with {tensor.dim()} dimensions"
            )
        labels = {
            "iteration": iteration, "microbatch": microbatch, "part": part, "num_parts": num_parts
        }  # fmt: skip
        note = [time.monotonic_ns(), self._dtypes.index(tensor.dtype), -1, *tensor.shape]
        with self._changed:
            out.waiting.append(_Put(tensor.detach().to("cpu"), note, labels))
        self._control.ring()

    def take(self, channel: int) -> Message:
        self._check()
        source = self._incoming[channel]
        with self._changed:
            if not source.announced:
                raise IndexError(f"rank {self.rank}: nothing has arrived on {source.spec}")
            found = source.announced[0]
        try:
            dtype, checksum, shape, sent_ns = self._read(found.tensor.tolist(), source.spec)
            tensor = torch.empty(shape, dtype=dtype)
            slot = self._receive_slots.slot(channel, source.num_taken, tensor.nbytes)
            if checksum >= 0 and zlib.crc32(slot.numpy().data) != checksum:
                raise ValueError(f"the checksum of microbatch {found.microbatch} is wrong")
        except (ValueError, IndexError, TypeError) as error:
            self._fail(ProtocolError(f"rank {self.rank}: {source.spec}: {one_line(error)}"))
            self._check()
        if tensor.nbytes:
            tensor.view(-1).view(torch.uint8).copy_(slot)
        with self._changed:
            source.announced.popleft()
            source.num_taken += 1
        self._control.ring()
        return found._replace(tensor=tensor.to(self._device), sent_ns=sent_ns)

    def _read(self, note: list[int], spec: ChannelSpec) -> tuple[torch.dtype, int, list[int], int]:
        """Dtype, checksum, shape and sending time of an announcement, checked."""
        sent_ns, code, checksum = note[:_NUM_FIELDS]
        shape, dtype = note[_NUM_FIELDS:], self._dtypes[code] if code >= 0 else None
        if dtype is None or len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
            raise ValueError(f"a broken announcement: {note[: _NUM_FIELDS + _MOST_DIMENSIONS]}")
        if math.prod(shape) * dtype.itemsize > spec.slot_bytes:
            raise ValueError(f"shape {shape} of {dtype} does not fit {spec.slot_bytes} bytes")
        return dtype, checksum, shape, sent_ns

    def links(self) -> Sequence[LinkInfo]:
        return [
            LinkInfo(link.peer, _NAME, f"asked for: NIXL over UCX; control: {link.reason}")
            for link in self._control.links()
            if link.peer in self._peers
        ]

    def departed(self, peer: int) -> bool:
        return peer in self._departed

    def silence(self, peer: int) -> float:
        return self._control.silence(peer)

    def abort(self, reason: str) -> None:
        self._abandon.stop()
        self._control.abort(reason)

    def let_go_in_child(self) -> None:
        keep_for_ever(self)  # a child must not take apart what threads of its parent use

    def close(self) -> None:
        if self._closed:
            return
        self._drained_at = time.monotonic() + _DRAIN_SECONDS
        self._closed = True
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            self._control.close()
            return
        self._abandon.stop()
        self._control.ring()
        self._thread.join(_JOIN_SECONDS)
        self._control.close()
        if self._thread.is_alive():
            return
        written = [put.write for out in self._outgoing for put in out.written]
        self._agent.close([write for write in written if write is not None])
        self._memory.close()


def _open_control(request: Request) -> NativeTransport:
    """The native transport: the announcements of all channels, then the credit of all channels."""
    from megatron.dpp.transport.open import open_native

    announcing = [dataclasses.replace(spec, slot_bytes=_NOTE_BYTES) for spec in request.channels]
    crediting = [
        dataclasses.replace(
            spec, source=spec.destination, destination=spec.source, chunk=-1 - spec.chunk
        )
        for spec in announcing
    ]
    options = dataclasses.replace(
        request.options, workload=_NOTE_BYTES // 4, spin=False, abandon_after=None
    )
    return open_native(
        dataclasses.replace(
            request,
            channels=[*announcing, *crediting],
            options=options,
            device=torch.device("cpu"),
        ),
        AUTO,
    )


KIND = TransportKind(name=_NAME, open=NixlTransport, between_hosts=True)
