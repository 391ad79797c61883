"""The Python side of the C++ transport: passes addresses of tensors and keeps tensors alive.

``open.py`` sets it up. CUDA tensors pass through the host unless a link's kind reads them in
place.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from megatron.dpp.config import missing_extension
from megatron.dpp.errors import FAILED, TransportUnavailable, print_error, shown
from megatron.dpp.processes import stopped
from megatron.dpp.transport.base import (
    OPENED,
    Board,
    LinkInfo,
    Message,
    Transport,
    check_payload,
)
from megatron.dpp.transport.joining import Request
from megatron.dpp.transport.kinds import find

_LOOK_SECONDS = 0.5


def load_native() -> Any:
    """The extension module.

    Raises:
        TransportUnavailable: it is not built, and the message names the command, or it does not
            load.
    """
    if missing := missing_extension():
        raise TransportUnavailable(missing)
    try:
        from megatron.dpp.transport import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise TransportUnavailable(
            f"the C++ extension of the transport does not load ({error}); build it on this machine"
        ) from error
    return _native


def device_index(device: torch.device) -> int:
    """The driver's number of a torch device; both count what CUDA_VISIBLE_DEVICES leaves."""
    return device.index if device.index is not None else torch.cuda.current_device()


class Abandon:
    """A thread that ends the process some time after a failure, until ``stop``.

    A failure is raised at the rank's next call into the transport. A rank that waits in a
    collective of another library makes no such call, and that library may wait for half an hour.
    The launcher then ends the node's other ranks.

    Args:
        failure: returns the failure's text, or an empty string; called from the thread.
        rank: for the message.
        grace: seconds between a failure and the end of the process; None starts no thread.
    """

    def __init__(self, failure: Callable[[], str], rank: int, grace: float | None) -> None:
        self._failure, self._rank, self._grace = failure, rank, grace
        self._pid, self._stopped = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dpp-abandon", daemon=True)
        if grace is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching; may be called twice. No effect in a forked child, whose parent has the
        thread, and may have had the event's lock.
        """
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            if not (failure := self._failure()):
                continue
            why = "a collective with the lost one?"
            if names := stopped(os.getpid()):
                are = "is" if len(names) == 1 else "are"
                why = f"{', '.join(names)}, which it started, {are} stopped"
            if not self._stopped.wait(self._grace):
                print_error(
                    f"rank {self._rank}: {failure}. This rank has waited for something else for "
                    f"{self._grace:g} s since ({why}): ended"
                )
                os._exit(FAILED)


class NativeBoard(Board):
    """A board in shared memory, which notes connect with those of other hosts."""

    def __init__(self, native: Any, *, index: int, size: int, spans_hosts: bool) -> None:
        self.index = index
        self.size = size
        self.spans_hosts = spans_hosts
        self._native = native

    def post(self, counters: Sequence[int]) -> None:
        self._native.board_post(counters)

    def common(self) -> Sequence[int]:
        counters: list[int] = self._native.board_common()
        return counters

    def append(self, word: int) -> None:
        if not 0 <= word < 1 << 63:
            raise ValueError(f"board word {word} is outside 0..2**63-1")
        self._native.board_append(word)

    def next(self) -> int | None:
        word: int | None = self._native.board_next()
        return word


class NativeTransport(Transport):
    """One rank's channels in C++; :func:`~megatron.dpp.transport.open.open_native` makes it.

    ``in_place``: peers whose links read and write CUDA tensors where they are.
    """

    def __init__(
        self,
        native: Any,
        request: Request,
        *,
        links: Sequence[LinkInfo],
        board: Board | None,
        in_place: Collection[int] = (),
    ) -> None:
        self.rank, device = request.rank, request.device
        self.incoming, self.outgoing = incoming, outgoing = request.incoming, request.outgoing
        self.board = board
        self._native = native
        self._device = device
        self._gpu = device_index(device) if device.type == "cuda" else -1
        self._links = links
        self._tells_what_comes = any(find(link.kind).announces for link in links)
        self._takes_in_place = [spec.source in in_place for spec in incoming]
        self._sends_in_place = [spec.destination in in_place for spec in outgoing]
        self._num_incoming = len(incoming)
        self._least_handed_over = load_native().least_handed_over
        self._dtypes = [getattr(torch, name, None) for name in load_native().dtype_names]
        self._codes = {dtype: code for code, dtype in enumerate(self._dtypes) if dtype is not None}
        # Tensors whose copy is not done, per channel: (number of the put, tensor).
        self._kept: list[deque[tuple[int, torch.Tensor]]] = [deque() for _ in outgoing]
        self._num_kept = 0
        self._abandon = Abandon(native.failure, self.rank, request.options.abandon_after)
        OPENED.add(self)

    def check(self) -> None:
        """Raise this transport's failure, if there is one."""
        self._native.check()

    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        spec = self.outgoing[channel]
        check_payload(tensor, spec)
        stream = 0
        if tensor.is_cuda:
            if self._sends_in_place[channel]:
                stream = torch._C._cuda_getCurrentRawStream(self._gpu)
            else:
                tensor = tensor.detach().cpu()
        code = self._codes.get(tensor.dtype)
        if code is None or tensor.dim() > 8:
            raise ValueError(f"{spec}: cannot send {tensor.dtype} with {tensor.dim()} dimensions")
        try:
            if self._native.put(
                channel,
                tensor.data_ptr(),
                tensor.nbytes,
                code,
                tensor.shape,
                iteration,
                microbatch,
                part,
                num_parts,
                stream,
            ):
                self._keep(channel, tensor)
        except BaseException:
            self._keep(channel, tensor)  # Ctrl-C may come between the put and the line above
            raise

    def _keep(self, channel: int, tensor: torch.Tensor) -> None:
        """Keep a tensor until the last put of a channel is done."""
        self._num_kept += 1
        # detach(): the caller may replace tensor.data, the storage has to stay.
        self._kept[channel].append((self._native.num_puts(channel), tensor.detach()))

    def poll(self) -> Sequence[int]:
        if self._num_kept:
            self._drop_sent()
        arrived: list[int] = self._native.poll(self._num_incoming)
        return arrived

    def coming(self) -> Sequence[int]:
        return self._native.coming(self._num_incoming) if self._tells_what_comes else ()

    def _drop_sent(self) -> None:
        for channel, kept in enumerate(self._kept):
            if kept:
                done = self._native.done(channel)
                while kept and kept[0][0] <= done:
                    kept.popleft()
                    self._num_kept -= 1

    def take(self, channel: int) -> Message:
        if not 0 <= channel < self._num_incoming:
            raise IndexError(f"channel {shown(channel)}: there are {self._num_incoming}")
        code, shape, strides, num_bytes, iteration, microbatch, part, num_parts, sent, arrived = (
            self._native.head(channel)
        )
        in_place, dtype = self._takes_in_place[channel], self._dtypes[code]
        memory = None
        if num_bytes >= self._least_handed_over and not in_place:
            memory = self._native.take_memory(channel, num_bytes)
        if memory is not None:
            # Not a view of the buffer's tensor: a stage may refuse to give views away.
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
        else:
            device = self._device if in_place else None
            # empty_strided() takes two thirds of the time of empty(), most of a small take().
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            stream = torch._C._cuda_getCurrentRawStream(self._gpu) if in_place else 0
            self._native.take(channel, tensor.data_ptr(), num_bytes, stream)
        if self._gpu >= 0 and not in_place:
            tensor = tensor.to(self._device)
        return Message(tensor, iteration, microbatch, part, num_parts, sent, arrived)

    def wait(self, seconds: float) -> bool:
        return bool(self._native.wait(seconds))

    def ring(self) -> None:
        """End ``wait`` from another thread of this process."""
        self._native.ring()

    def pending(self) -> int:
        self.check()
        self._drop_sent()
        return int(self._native.pending())

    def pending_bytes(self) -> int:
        self._drop_sent()
        return sum(tensor.nbytes for kept in self._kept for _, tensor in kept)

    def _has_unsent(self, channel: int) -> bool:
        return bool(self._native.done(channel) < self._native.num_puts(channel))

    def links(self) -> Sequence[LinkInfo]:
        return self._links

    def departed(self, peer: int) -> bool:
        return bool(self._native.departed(peer))

    def brought(self, channel: int) -> str:
        if (last := self._native.last_taken(channel)) is None:
            return ""
        source = self.incoming[channel].source
        kind = next(link.kind for link in self._links if link.peer == source)
        return f" (over {kind} microbatch {last[1]} of iteration {last[0]} came last)"

    def silence(self, peer: int) -> float:
        return float(self._native.silence(peer))

    def abort(self, reason: str) -> None:
        self._abandon.stop()
        self._native.abort(reason)

    def close(self) -> None:
        self._abandon.stop()
        self._native.close()
        for kept in self._kept:
            kept.clear()

    def let_go_in_child(self) -> None:
        # Connections in a data loader's worker would let a killed parent look alive to its peers.
        self._native.disown()
