"""Sums over two tensor-parallel ranks by their GPUs' copy engines, behind weight gradients.

The backward of a column-parallel layer sums its input's gradient over the tensor-parallel ranks
while it computes its weight's. megatron-core orders the two by ``CUDA_DEVICE_MAX_CONNECTIONS=1``,
of which a CUDA graph knows nothing: the product takes all multiprocessors first, the kernel of
NCCL's sum comes when it is done, and nothing is hidden. ``PairSums`` needs no multiprocessor for
what takes long: each copy engine writes its rank's part into the memory of the other one, streams
wait for words in memory, and one short kernel adds (docs/decisions/0014-sums-behind-products.md).

Two terms give one rounded sum in either order, so the numbers are NCCL's to the last bit. Three and
more ranks would send more than NCCL's ring and are left to it, as is everything outside of graphs.
``graphs`` is the only caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers

from megatron.dpp.config import COPIED_SUMS_FROM
from megatron.dpp.errors import SetupError, one_line
from megatron.dpp.mcore.patching import replaced
from megatron.dpp.transport.native import load_native
from megatron.dpp.transport.rendezvous import host_identity

READY, FREE = range(2)
"""Words of a rank's memory that the other one sets: "my part is in your memory", "what you have put
into mine was used". The second is set at first."""
_BEGINNING = 256
"""Bytes that the words have for themselves, before the other rank's part."""
_TRIAL = 1 << 19
"""Bytes that are sent when a wire is tried, if it is that wide."""


class Line(Protocol):
    """What two ranks do to each other's memory. Everything is queued on a stream."""

    def take(self, word: int) -> None:
        """Wait until the own word is set, and clear it."""

    def post(self, word: int) -> None:
        """Set the other rank's word."""

    def push(self, tensor: torch.Tensor) -> None:
        """Copy into the other rank's memory."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add what the other rank has copied."""


def exchange(line: Line, tensor: torch.Tensor) -> None:
    """``tensor`` becomes the sum of both ranks' tensors; both call this in the same order."""
    line.take(FREE)
    line.push(tensor)
    line.post(READY)
    line.take(READY)
    line.add(tensor)
    line.post(FREE)


class _Wire:
    """A :class:`Line` over peer memory; PyTorch's symmetric memory makes it and maps it.

    ``allocate``, ``join``, ``send`` and ``check`` are steps that both ranks take together: each
    waits until the other one has done the step before.

    Args:
        group: of two ranks on one host.
        num_bytes: the largest tensor's.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self._group, self._device, self._total = group, device, _BEGINNING + num_bytes

    def allocate(self) -> None:
        """Take this rank's memory, and what the driver has to offer."""
        import torch.distributed._symmetric_memory as symmetric

        index = self._device.index
        driver = load_native().CudaDevice(torch.cuda.current_device() if index is None else index)
        self._write, self._wait = driver.write_value, driver.wait_value
        self._memory = symmetric.empty(self._total, dtype=torch.uint8, device=self._device)

    def join(self) -> None:
        """Map both ranks' memory, lay out the words of the own, and forget what it held before."""
        import torch.distributed._symmetric_memory as symmetric

        self._mapping = symmetric.rendezvous(self._memory, self._group)
        rank, shape = self._group.rank(), (self._total,)
        self._own = self._mapping.get_buffer(rank, shape, torch.uint8)
        self._other = self._mapping.get_buffer(1 - rank, shape, torch.uint8)
        self._words = self._own[:_BEGINNING].view(torch.int32)
        self._own[: _BEGINNING + _TRIAL].zero_()
        self._words[FREE] = 1

    def send(self) -> None:
        """Try it: write something that the other rank knows."""
        self.push(self._pattern(self._group.rank()))
        self.post(READY)

    def check(self) -> None:
        """Look for what the other rank has written; no stream waits for what has not come.

        Raises:
            SetupError: it is not there, or not as it was.
        """
        expected = self._pattern(1 - self._group.rank())
        got = torch.zeros_like(expected)
        came = int(self._words[READY]) == 1
        if came:
            self.take(READY)
            self.add(got)
        if not (came and torch.equal(got, expected) and int(self._words[READY]) == 0):
            raise SetupError("what one GPU writes the other does not find")

    def _pattern(self, rank: int) -> torch.Tensor:
        num_bytes = min(_TRIAL, self._total - _BEGINNING)
        return torch.arange(num_bytes // 8, device=self._device) + rank

    def take(self, word: int) -> None:
        at = self._own.data_ptr() + 4 * word
        stream = torch.cuda.current_stream().cuda_stream
        self._wait(stream, at, 1)
        self._write(stream, at, 0)

    def post(self, word: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._write(stream, self._other.data_ptr() + 4 * word, 1)

    def push(self, tensor: torch.Tensor) -> None:
        self._part(self._other, tensor).copy_(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        tensor.add_(self._part(self._own, tensor))

    @staticmethod
    def _part(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        part = memory.narrow(0, _BEGINNING, tensor.numel() * tensor.element_size())
        return part.view(tensor.dtype).view(tensor.shape)


class PairSums:
    """The sums of one pair of tensor-parallel ranks; :func:`open_pair_sums` makes it.

    Args:
        group: the pair.
        line: to the other rank.
        num_bytes: of the tensors that go over it; others are left to ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, line: Line, num_bytes: int) -> None:
        self._group, self._line, self._num_bytes = group, line, num_bytes
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._stand_in = _StandIn(group, self)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Linear layers whose forwards run meanwhile sum their input's gradients here, where their
        backward is captured.
        """

        def linear(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if options.get("tp_group") is self._group and options.get("allreduce_dgrad"):
                options["tp_group"] = self._stand_in
            return own(*args, **options)

        with replaced(layers, "linear_with_grad_accumulation_and_async_allreduce", linear):
            yield

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether this sum goes over the line. The ranks of the pair say the same."""
        return (
            tensor.numel() * tensor.element_size() == self._num_bytes
            and tensor.is_contiguous()
            and torch.cuda.is_current_stream_capturing()
        )

    def start(self, tensor: torch.Tensor) -> None:
        """Sum in place, behind what the current stream has to do before."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            exchange(self._line, tensor)

    def wait(self) -> None:
        """What the current stream does from here on finds the sum."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def agree(self, fine: bool) -> bool:
        """Whether both ranks are fine. A rank that replays waits for the other one's copies, so
        both replay a graph or neither does.
        """
        return _agree(self._group, fine)


class _StandIn(dist.ProcessGroup):
    """The pair as the backward of a linear layer knows it: it asks for nothing but this sum."""

    def __init__(self, group: dist.ProcessGroup, sums: PairSums) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._pair, self._sums = group, sums

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], options: Any
    ) -> Any:
        if not self._sums.takes(tensors[0]):
            return self._pair.allreduce(tensors, options)
        self._sums.start(tensors[0])
        return self._sums


def open_pair_sums(
    chunk: torch.nn.Module, example: torch.Tensor, log: Callable[[str], None]
) -> PairSums | None:
    """Join this rank with the other one of its pair; None, and a line in the log where one would
    expect otherwise, if NCCL sums as ever. All ranks of a tensor-parallel group call this together.

    Args:
        chunk: a model chunk.
        example: a tensor like a hidden state, [s, b, h].
    """
    group, num_bytes = _summed_over(chunk, example.dtype), example.numel() * example.element_size()
    if group is None or not example.is_cuda or group.size() != 2 or num_bytes < COPIED_SUMS_FROM:
        return None
    wire, fault = _joined(group, example, num_bytes)
    if wire is None:
        log(f"CUDA graphs: NCCL sums the gradients of inputs: {fault}")
        return None
    log("CUDA graphs: copy engines sum the gradients of inputs behind those of weights")
    return PairSums(group, wire, num_bytes)


def _joined(
    group: dist.ProcessGroup, example: torch.Tensor, num_bytes: int
) -> tuple[_Wire | None, str]:
    """A wire that delivers, or why there is none. Both ranks go through the same rounds, whichever
    of them cannot go on.
    """
    if not _on_one_host(group):
        return None, "the ranks are on two hosts"
    wire = _Wire(group, num_bytes, example.device)
    for step in (wire.allocate, wire.join, wire.send, wire.check):
        fault = ""
        try:
            step()
        except Exception as error:  # NCCL can do without, whatever it is
            fault = one_line(error, 200)
        if not _agree(group, not fault):
            return None, fault or "the other rank cannot"
    return wire, ""


def _summed_over(chunk: torch.nn.Module, dtype: torch.dtype) -> dist.ProcessGroup | None:
    """The group that the chunk's layers sum their inputs' gradients over, which have this dtype."""
    for module in chunk.modules():
        if isinstance(module, layers.ColumnParallelLinear) and module.allreduce_dgrad:
            group: dist.ProcessGroup = module.tp_group
            return group if module.weight is None or module.weight.dtype == dtype else None
    return None


def _on_one_host(group: dist.ProcessGroup) -> bool:
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, host_identity(), group=group)
    return len(set(hosts)) == 1


def _agree(group: dist.ProcessGroup, fine: bool) -> bool:
    everyone = torch.tensor([fine], dtype=torch.int32, device="cuda")
    dist.all_reduce(everyone, op=dist.ReduceOp.MIN, group=group)
    return bool(everyone.item())
