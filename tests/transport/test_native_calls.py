"""The Python side of the native transport: its calls into C++, and the tensors that it keeps."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.transport import ChannelSpec, Direction, LinkInfo
from megatron.dpp.transport import native as module
from megatron.dpp.transport.native import NativeTransport, load_native
from tests.transport.kinds import PATIENCE, forked

OUTGOING = [
    ChannelSpec(1, 2, 0, Direction.FORWARD, 1 << 12),
    ChannelSpec(1, 0, 1, Direction.BACKWARD, 1 << 12),
]
INCOMING = [
    ChannelSpec(0, 1, 0, Direction.FORWARD, 1 << 12),
    ChannelSpec(2, 1, 0, Direction.BACKWARD, 1 << 12),
    ChannelSpec(2, 1, 1, Direction.BACKWARD, 1 << 12),
]
FLOAT = load_native().dtype_names.index("float32")


class Native:
    """The C++ transport: keeps every call, and says what the test sets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.puts, self.sent = [0, 0], [0, 0]
        self.borrows = True
        self.gone: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))

    def put(self, channel: int, *given: Any) -> bool:
        self.puts[channel] += 1
        self.calls.append(("put", channel, *given))
        return self.borrows

    def num_puts(self, channel: int) -> int:
        return self.puts[channel]

    def done(self, channel: int) -> int:
        return self.sent[channel]

    def poll(self, count: int) -> list[int]:
        return [5] * count

    def coming(self, count: int) -> list[int]:
        return [6] * count

    def head(self, channel: int) -> tuple[Any, ...]:
        return FLOAT, (3,), (1,), 12, 40, 41, 42, 43, 44, 45 + channel

    def wait(self, seconds: float) -> bool:
        return seconds > 1.0

    def pending(self) -> int:
        return sum(self.puts) - sum(self.sent)

    def departed(self, peer: int) -> bool:
        return peer in self.gone


def made(
    native: Native, kinds: Sequence[str] = ("shm",), in_place: Any = (), device: str = "cpu",
    abandon_after: float | None = None,
) -> NativeTransport:  # fmt: skip
    links = [LinkInfo(peer, kind, "") for peer, kind in enumerate(kinds)]
    return NativeTransport(
        native, rank=1, incoming=INCOMING, outgoing=OUTGOING, device=torch.device(device),
        links=links, board=None, in_place=in_place, abandon_after=abandon_after,
    )  # fmt: skip


def put(transport: NativeTransport, channel: int, tensor: torch.Tensor) -> None:
    transport.put(channel, tensor, iteration=3, microbatch=4, part=5, num_parts=6)


def test_a_tensor_is_kept_until_the_put_of_its_channel_is_done() -> None:
    native = Native()
    transport = made(native)
    for channel, size in ((0, 1), (1, 10), (0, 100), (0, 1000)):
        put(transport, channel, torch.ones(size, dtype=torch.uint8))
    assert transport.pending_bytes() == 1111
    native.sent = [2, 0]
    assert transport.poll() == [5, 5, 5]
    assert transport.pending_bytes() == 1010
    native.sent = [3, 0]
    assert transport.pending() == 1
    assert transport.pending_bytes() == 10
    native.sent = [3, 1]
    assert transport.pending_bytes() == 0
    put(transport, 0, torch.ones(1))
    assert transport.pending_bytes() == 4
    transport.close()
    assert transport.pending_bytes() == 0


def test_only_tensors_that_cxx_still_reads_are_kept() -> None:
    native = Native()
    native.borrows = False
    transport = made(native)
    put(transport, 0, torch.ones(4))
    assert transport.pending_bytes() == 0
    native.borrows = True
    memory = numpy.ones(4, numpy.float32)
    alive, tensor = weakref.ref(memory), torch.from_numpy(memory)
    put(transport, 0, tensor)
    tensor.data = torch.empty(1)
    del memory
    assert alive() is not None and transport.pending_bytes() == 16
    native.sent = [2, 0]
    transport.poll()
    assert alive() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, PeerDead, SystemExit])
def test_a_tensor_is_kept_where_nobody_knows_whether_its_put_began(
    error: type[BaseException],
) -> None:
    """Ctrl-C may come while C++ reads it already."""
    native: Any = Native()
    transport = made(native)

    def put_and_fail(channel: int, *given: Any) -> bool:
        native.puts[channel] += 1
        raise error("x")

    native.put = put_and_fail
    with pytest.raises(error):
        put(transport, 0, torch.ones(4))
    assert transport.pending_bytes() == 16


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full(self.shape, 7.0)


def test_links_that_read_gpu_memory_get_the_stream_and_others_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._C._cuda_getCurrentRawStream"
    monkeypatch.setattr(name, lambda gpu: 900 + gpu, raising=False)
    native = Native()
    transport = made(native, in_place={2}, device="cuda:3")
    tensor = torch.ones(5).as_subclass(OnGpu)
    put(transport, 0, tensor)  # to rank 2
    put(transport, 1, tensor)  # to rank 0
    (first, second) = native.calls
    assert (first[2], first[-1]) == (tensor.data_ptr(), 903)
    assert second[2] != tensor.data_ptr() and second[-1] == 0
    assert transport.pending_bytes() == 40
    assert list((ctypes.c_float * 5).from_address(second[2])) == [7.0] * 5
    transport = made(native, in_place={2})
    for channel, stream in ((0, 0), (1, 899), (2, 899)):
        native.calls.clear()
        message = transport.take(channel)
        assert native.calls == [("take", channel, message.tensor.data_ptr(), 12, stream)]
        assert message[1:] == (40, 41, 42, 43, 44, 45 + channel)
        assert message.tensor.shape == (3,) and message.tensor.dtype == torch.float32


def test_a_link_that_announces_lets_messages_be_taken_ahead() -> None:
    assert made(Native(), ["shm", "tcp"]).coming() == ()
    assert made(Native(), ["shm", "cuda_ipc"]).coming() == [6, 6, 6]


def test_a_flush_without_progress_names_a_receiver_that_left_with_puts_before_it() -> None:
    native = Native()
    transport = made(native)
    put(transport, 1, torch.ones(1))  # to rank 0
    native.gone = {2}
    text = "rank 1: 1 puts are pending, and none left for 0.001 s"
    with pytest.raises(TransferTimeout, match=text):
        transport.flush(0.001)
    native.gone = {0}
    with pytest.raises(PeerDead, match=f"{text}: rank 0 has closed its transport"):
        transport.flush(0.001)
    put(transport, 0, torch.ones(1))  # to rank 2
    native.sent = [0, 1]
    with pytest.raises(TransferTimeout, match=text):
        transport.flush(0.001)


WATCHES: list[Watch] = []


class Watch:
    """Stands for the thread that ends a process."""

    def __init__(self, *given: Any) -> None:
        self.given, self.stops = given, 0
        WATCHES.append(self)

    def stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize("end", ["close", "abort"])
def test_nobody_ends_a_process_whose_transport_has_ended(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Abandon", Watch)
    native = Native()
    transport = made(native, abandon_after=3.0)
    watch = WATCHES[-1]
    assert watch.given[1:] == (1, 3.0)
    getattr(transport, end)(*(["why"] if end == "abort" else []))
    transport.close()
    assert watch.stops == 1
    assert native.calls[0] == (("abort", "why") if end == "abort" else ("close",))


def test_a_forked_child_only_closes_what_it_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Abandon", Watch)
    native = Native()
    transport = made(native, abandon_after=3.0)

    def body(rank: int, path: str, results: Any) -> None:
        transport.close()
        results.put((WATCHES[-1].stops, native.calls))

    with forked(1, body, tmp_path) as (_, results):
        assert results.get(PATIENCE) == (0, [("disown",), ("close",)])
    assert native.calls == []
