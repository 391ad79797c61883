"""Sums over two tensor-parallel ranks without NCCL: the order of what they do to each other's
memory, and which sums go that way. That the numbers are NCCL's is test_equality.py's matter.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.tensor_parallel import layers

from megatron.dpp.mcore import pair_sums
from megatron.dpp.mcore.pair_sums import FREE, READY, PairSums, exchange, open_pair_sums

Step = Callable[[], bool]
"""One thing that a GPU does when it comes to it; False: not yet."""


class Gpu:
    """One rank's stream, words and memory: a :class:`pair_sums.Line` whose steps run later."""

    def __init__(self) -> None:
        self.stream: deque[Step] = deque()
        self.words = {READY: 0, FREE: 1}
        self.memory: float | None = None
        self.other: Gpu

    def take(self, word: int) -> None:
        def step() -> bool:
            if self.words[word]:
                self.words[word] = 0
                return True
            return False

        self.stream.append(step)

    def post(self, word: int) -> None:
        def step() -> bool:
            assert not self.other.words[word], "a word was set before its last setting was seen"
            self.other.words[word] = 1
            return True

        self.stream.append(step)

    def push(self, tensor: torch.Tensor) -> None:
        def step() -> bool:
            assert self.other.memory is None, "what was not read yet was written over"
            self.other.memory = tensor.item()
            return True

        self.stream.append(step)

    def add(self, tensor: torch.Tensor) -> None:
        def step() -> bool:
            tensor.add_(self.memory)
            self.memory = None
            return True

        self.stream.append(step)


@given(
    terms=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=6),
    turns=st.lists(st.booleans(), max_size=200),
)
def test_any_pace_of_two_gpus_gives_every_sum(
    terms: list[tuple[int, int]], turns: list[bool]
) -> None:
    one, two = Gpu(), Gpu()
    one.other, two.other = two, one
    tensors = [(torch.tensor([float(a)]), torch.tensor([float(b)])) for a, b in terms]
    for first, second in tensors:
        exchange(one, first)
        exchange(two, second)
    while one.stream or two.stream:
        sooner = [one, two] if turns and turns.pop() else [two, one]
        rank = next((gpu for gpu in sooner if gpu.stream and gpu.stream[0]()), None)
        assert rank is not None, "both wait"
        rank.stream.popleft()
    for (first, second), (a, b) in zip(tensors, terms, strict=True):
        assert first.item() == second.item() == a + b
    assert one.words == two.words == {READY: 0, FREE: 1}


class Group:
    """A process group that notes what it was asked for."""

    def __init__(self) -> None:
        self.summed: list[torch.Tensor] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.summed += tensors
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Of a pair without GPUs; every stream is being captured."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return Group()


def pair(group: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[PairSums, list[str]]:
    """Sums of 64 bytes, and what they were asked to do."""
    made, done = PairSums(group, Gpu(), 64), list[str]()
    monkeypatch.setattr(made, "start", lambda tensor: done.append("start"))
    monkeypatch.setattr(made, "wait", lambda: done.append("wait"))
    return made, done


def test_the_stand_in_sums_what_has_the_size_and_leaves_the_rest(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, done = pair(group, monkeypatch)
    hidden, other = torch.zeros(16), torch.zeros(17)
    handle = dist.all_reduce(hidden, group=made._stand_in, async_op=True)
    assert done == ["start"]
    handle.wait()
    assert done == ["start", "wait"] and not group.summed
    dist.all_reduce(other, group=made._stand_in, async_op=True)
    strided = torch.zeros(32)[::2]
    dist.all_reduce(strided, group=made._stand_in, async_op=True)
    assert [id(t) for t in group.summed] == [id(other), id(strided)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.all_reduce(hidden, group=made._stand_in, async_op=True)
    assert group.summed[-1] is hidden and done == ["start", "wait"]


def test_only_layers_that_sum_over_the_pair_are_given_the_stand_in(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Any] = []
    name = "linear_with_grad_accumulation_and_async_allreduce"
    own = SimpleNamespace(warned=True)

    def linear(*args: Any, **options: Any) -> None:
        got.append(options["tp_group"])

    linear.warned = own.warned  # type: ignore[attr-defined]
    monkeypatch.setattr(layers, name, linear)
    made, _ = pair(group, monkeypatch)
    with made.used():
        replacement = getattr(layers, name)
        assert replacement.warned
        replacement(1, allreduce_dgrad=True, tp_group=group)
        replacement(1, allreduce_dgrad=False, tp_group=group)
        replacement(1, allreduce_dgrad=True, tp_group=own)
    assert got == [made._stand_in, group, own]
    assert getattr(layers, name) is linear


@pytest.mark.parametrize(
    ("ranks", "numel", "on_gpu"), [(3, 1 << 23, True), (2, 1 << 22, True), (2, 1 << 23, False)]
)
def test_other_groups_than_pairs_small_states_and_cpus_open_nothing_and_say_nothing(
    monkeypatch: pytest.MonkeyPatch, ranks: int, numel: int, on_gpu: bool
) -> None:
    group = SimpleNamespace(size=lambda: ranks)
    monkeypatch.setattr(pair_sums, "_summed_over", lambda chunk, dtype: group)
    monkeypatch.setattr(pair_sums, "_joined", lambda *args: pytest.fail("joined"))
    example: Any = SimpleNamespace(
        numel=lambda: numel, element_size=lambda: 2, is_cuda=on_gpu, dtype=torch.bfloat16
    )
    said: list[str] = []
    assert open_pair_sums(torch.nn.Identity(), example, said.append) is None
    assert said == []


class Driver:
    """Stream memory operations, at once; what waits gives up in the end."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def wait_value(self, stream: int, address: int, value: int) -> None:
        deadline = time.monotonic() + 20
        while ctypes.c_uint32.from_address(address).value != value:
            assert time.monotonic() < deadline
            time.sleep(0.0005)


class Host:
    """Two ranks, as threads, with memory that both can reach."""

    def __init__(self) -> None:
        self.memories: list[Any] = [None, None]
        self.votes = [True, True]
        self.barrier = threading.Barrier(2, timeout=20)

    def rendezvous(self, memory: torch.Tensor, group: Any) -> Any:
        self.memories[group.rank()] = memory
        self.barrier.wait()
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: self.memories[rank])

    def agree(self, group: Any, fine: bool) -> bool:
        self.votes[group.rank()] = fine
        self.barrier.wait()
        both = all(self.votes)
        self.barrier.wait()
        return both


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(symmetric, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", host.rendezvous)
    monkeypatch.setattr(pair_sums, "load_native", lambda: SimpleNamespace(CudaDevice=made_driver))
    monkeypatch.setattr(pair_sums, "_agree", host.agree)
    monkeypatch.setattr(pair_sums, "_on_one_host", lambda group: True)
    monkeypatch.setattr(pair_sums, "_summed_over", lambda chunk, dtype: chunk)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    return host


def made_driver(index: int) -> Driver:
    return Driver()


def opened_by_both() -> list[tuple[PairSums | None, list[str]]]:
    """What each rank gets, and what it says."""
    example = SimpleNamespace(
        numel=lambda: 1 << 23, element_size=lambda: 2, is_cuda=True, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip

    def opened(rank: int) -> tuple[PairSums | None, list[str]]:
        said: list[str] = []
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        return open_pair_sums(group, example, said.append), said  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(opened, range(2)))


def test_two_ranks_join_try_the_line_and_sum(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_sums, "_StandIn", lambda group, sums: None)
    (one, said), (two, _) = opened_by_both()
    assert one is not None and two is not None
    assert said == ["CUDA graphs: copy engines sum the gradients of inputs behind those of weights"]
    generator = torch.Generator().manual_seed(1)
    terms = [torch.randn(5, 50, 7, generator=generator).bfloat16() for _ in range(2)]
    expected = terms[0] + terms[1]

    def summed(sums: PairSums, own: torch.Tensor) -> torch.Tensor:
        for part in own:
            exchange(sums._line, part)
        return own

    with ThreadPoolExecutor(2) as threads:
        for result in threads.map(summed, (one, two), terms):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("step", ["allocate", "join", "send", "check"])
def test_where_one_of_two_cannot_both_are_summed_by_nccl(
    host: Host, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Both go through the same rounds: neither waits for one that has given up."""
    own = getattr(pair_sums._Wire, step)

    def failing(wire: Any) -> None:
        own(wire)
        if wire._group.rank() == 1:
            raise RuntimeError("no peer access\n  here")

    monkeypatch.setattr(pair_sums._Wire, step, failing)
    (one, said), (two, its) = opened_by_both()
    assert one is None and two is None
    assert said == ["CUDA graphs: NCCL sums the gradients of inputs: the other rank cannot"]
    assert its == ["CUDA graphs: NCCL sums the gradients of inputs: no peer access here"]


@pytest.mark.parametrize("lost", ["push", "post"])
def test_a_line_that_loses_what_is_written_is_not_used(
    host: Host, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Even where the memory still holds what an earlier line was tried with."""
    own = pair_sums._Wire.allocate

    def stale(wire: Any) -> None:
        own(wire)
        pattern = wire._pattern(1 - wire._group.rank())
        wire._part(wire._memory, pattern).copy_(pattern)
        wire._memory[:8].view(torch.int32)[READY] = 1

    monkeypatch.setattr(pair_sums._Wire, "allocate", stale)
    monkeypatch.setattr(pair_sums._Wire, lost, lambda wire, what: None)
    for sums, said in opened_by_both():
        assert sums is None
        assert said[0].endswith("what one GPU writes the other does not find")


def test_ranks_on_two_hosts_are_not_joined(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_sums, "_on_one_host", lambda group: False)
    for sums, said in opened_by_both():
        assert sums is None and said[0].endswith("the ranks are on two hosts")
