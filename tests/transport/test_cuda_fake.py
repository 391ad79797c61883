"""The GPU kinds without a GPU: everything but the driver, over csrc/tests/fake_cuda.cc.

CPU tensors play CUDA tensors: the double's device memory is host memory.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron.dpp.doctor import probe_gpu_direct
from megatron.dpp.errors import PeerDead, TransportUnavailable
from megatron.dpp.transport import ChannelSpec, Direction, Transport
from tests.transport.conftest import Trouble
from tests.transport.kinds import PATIENCE, cpu_as_gpu, fake_cuda, fake_verbs, opened, take_next
from tests.transport.meeting import errors_of

SLOT = 1 << 19  # large enough for a take without the interpreter's lock
CHUNKS = 3
MANY = 8  # channels, each of which could wait for itself


def channels(chunks: int = CHUNKS) -> list[ChannelSpec]:
    """So many channels in each direction."""
    return [
        ChannelSpec(source, 1 - source, chunk, Direction(source), SLOT)
        for source in (0, 1)
        for chunk in range(chunks)
    ]


@pytest.fixture(autouse=True)
def driver() -> Iterator[Any]:
    """The doubles of the driver and of libibverbs."""
    fake_verbs()
    made = fake_cuda()
    with cpu_as_gpu():
        yield made
        assert made.fake_cuda_contexts() == 0, "PyTorch's context is current"


@contextlib.contextmanager
def two(kind: str, chunks: int = CHUNKS, **options: Any) -> Iterator[list[Transport]]:
    """Two ranks with GPUs."""
    with opened(kind, channels(chunks), timeout=20.0, workload=5000, **options) as ends:
        yield ends


def refusals(kind: str, trouble: Trouble, faults: dict[str, int], *gpudirect: str) -> str:
    """The errors of both ranks, whose link is refused."""
    for name, value in faults.items():
        trouble(name, value)
    options = [{"gpudirect": way, "workload": 5000} for way in gpudirect]
    # A quarter of the patience is that of a path's test.
    found = errors_of(kind, 6.0, [channels()] * 2, options, seconds=0.0)
    assert TransportUnavailable in map(type, found.values()) and None not in found.values(), found
    return "\n".join(map(str, found.values()))


def exchange(a: Transport, b: Transport) -> None:
    """Random channels, sizes and dtypes; puts run ahead of takes; every payload is compared."""
    choice, taken = random.Random(1), [0] * CHUNKS
    for turn in range(20):
        sent = []
        for number in range(6):
            channel, dtype = (
                choice.randrange(CHUNKS),
                choice.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8)),
            )
            size = choice.choice((0, 1, 1000, 5000, 5001, 12345, SLOT // 8))
            sent.append((channel, (torch.arange(size) % 97 + 6 * turn + number).to(dtype)))
            a.put(channel, sent[-1][1].clone(), iteration=turn, microbatch=number)
        for number, (channel, expected) in enumerate(sent):
            found = take_next(b, channel, taken[channel])
            assert (found.iteration, found.microbatch) == (turn, number)
            assert found.tensor.dtype == expected.dtype and torch.equal(found.tensor, expected)
            taken[channel] += 1
    a.flush(PATIENCE)
    assert a.pending() == 0


def both_ways(kind: str, driver: Any, **options: Any) -> str:
    """Random messages both ways; nothing is copied from memory that is not pinned, and all memory
    is given back by the right call. Returns the reasons of both ends of the link."""
    gc.collect()
    kept = driver.fake_cuda_pieces()  # of streams that hang
    with two(kind, **options) as (a, b):
        pageable = driver.fake_cuda_pageable()  # the links' own tests
        exchange(a, b)
        exchange(b, a)
        reasons = "\n".join(end.links()[0].reason for end in (a, b))
        if not options.get("checksum"):  # which waits for a copy
            assert driver.fake_cuda_pageable() == pageable
    del a, b
    gc.collect()
    assert driver.fake_cuda_strays() == 0 and driver.fake_cuda_pieces() <= kept
    return reasons


@pytest.mark.parametrize(
    ("kind", "checksum", "refuse"),
    [("cuda_ipc", False, False), ("cuda_ipc", False, True), ("cuda_ipc", True, False),
     ("staged", True, False), ("rdma", True, False)],
)  # fmt: skip
def test_random_messages_arrive_and_memory_is_given_back(
    kind: str, checksum: bool, refuse: bool, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots travel as descriptors where handles are refused."""
    if refuse:
        monkeypatch.setenv("FAKE_CUDA_REFUSE_IPC", "1")
    both_ways(kind, driver, checksum=checksum)


# What a GPU shows ---------------------------------------------------------------------------------


def take_ahead(a: Transport, b: Transport, driver: Any) -> None:
    """Messages may be taken before they are known to have arrived, in order and with credit."""
    ahead = 0
    for i in range(8):
        a.put(1, torch.full((1000,), i), iteration=2, microbatch=i)
        while b.coming()[1] == i:  # the slot of the message before last may not be free yet
            a.wait(0.01)
        message = b.take(1)
        assert message.microbatch == i and torch.equal(message.tensor, torch.full((1000,), i))
        ahead += message.arrived_ns == 0
        assert b.poll()[1] == b.coming()[1] == i + 1
    assert ahead > 0, "events are slow"
    a.flush(PATIENCE)
    a.put(1, torch.ones(3), iteration=2, microbatch=8)
    a.flush(PATIENCE)
    assert b.poll()[1] == 9 and b.take(1).arrived_ns > 0


def not_ahead(a: Transport, b: Transport, driver: Any) -> None:
    """Only arrived messages may be taken if the driver cannot write values."""
    assert "nothing is launched ahead: cuStreamWriteValue32 on Fake GPU" in b.links()[0].reason
    for i in range(4):
        a.put(1, torch.full((1000,), i), iteration=2, microbatch=i)
        assert b.coming()[1] <= b.poll()[1]
        assert torch.equal(take_next(b, 1, i).tensor, torch.full((1000,), i))


def let_go(a: Transport, b: Transport, driver: Any) -> None:
    """A stream waits for what never comes, until its sender has given up."""
    a.put(0, torch.zeros(SLOT // 4), iteration=2, microbatch=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(b.take, 0)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        a.abort("asked to")
        waiting.result(15.0)  # less than the timeout of both ends
    with pytest.raises(PeerDead, match="asked to"):
        b.poll()


def one_wait(a: Transport, b: Transport, driver: Any) -> None:
    """Our stream is told once per message to wait for its producer, also when all buffers of the
    link are in use and sending has to be tried again."""
    before, order = driver.fake_cuda_waits(), [*range(CHUNKS), *range(CHUNKS)]
    for turn in range(10):
        for channel in order:
            a.put(channel, torch.zeros(SLOT // 4), iteration=2, microbatch=turn)
        for number, channel in enumerate(order):
            take_next(b, channel, 2 * turn + number // CHUNKS)
    a.flush(PATIENCE)
    assert driver.fake_cuda_waits() - before == 10 * len(order)


def marks(a: Transport, b: Transport, driver: Any) -> None:
    """Slots that are free again before their sender has seen its copies into them happen."""
    before = driver.fake_cuda_unseen()
    for i in range(10):
        a.put(0, torch.full((1000,), i), iteration=2, microbatch=i)
        while b.coming()[0] == i:
            b.poll()
        assert b.take(0).microbatch == i
    a.flush(PATIENCE)
    assert driver.fake_cuda_unseen() == before, "marks were set again before they were looked at"


def close_busy(a: Transport, b: Transport, driver: Any) -> None:
    """Memory is not freed while one of our streams uses it."""
    before = driver.fake_cuda_early()
    a.put(0, torch.ones(1000), iteration=2, microbatch=0)
    time.sleep(0.1)  # the progress thread queues what put() has not
    a.abort("asked to")
    a.close()
    assert driver.fake_cuda_early() == before, "memory was given up while a stream used it"


def close_stuck(a: Transport, b: Transport, driver: Any) -> None:
    """The caller's stream never gets to what was taken, as in a collective with a dead rank."""
    for channel in range(MANY):
        a.put(channel, torch.ones(10), iteration=2, microbatch=0)
        b.take(channel)
    a.abort("asked to")
    begin = time.monotonic()
    b.close()
    assert time.monotonic() - begin < 10.0


def one_by_one(a: Transport, b: Transport, driver: Any) -> None:
    """Each message is taken before the next one is put, whose arrival would show this one's. Peers
    may write headers and payloads of slots, and no buffer that is sent from."""
    assert fake_verbs().fake_verbs_seen(b"remote-regions") == 4
    for i, size in enumerate((1, 0, 2, 1, 3)):
        tensor = torch.full((size,), 100 + i, dtype=torch.uint8)
        a.put(1, tensor.clone(), iteration=2, microbatch=i)
        assert torch.equal(take_next(b, 1, i).tensor, tensor), f"message {i}"


BUSY = {"SLOW": "100000000", "BUSY": "20"}
Scenario = Callable[[Transport, Transport, Any], None]


@pytest.mark.parametrize(
    ("kind", "scenario", "settings"),
    [
        ("cuda_ipc", take_ahead, {"SLOW": "3000"}),
        ("cuda_ipc", not_ahead, {"SLOW": "3000", "NO_VALUES": "1"}),
        ("cuda_ipc", let_go, {"SLOW": "1000000", "SILENT": "1"}),
        ("rdma", one_wait, {}),
        ("cuda_ipc", marks, {"SLOW_COPIES": "500"}),
        *((kind, close_busy, BUSY) for kind in ("cuda_ipc", "staged", "rdma")),
        ("rdma", close_busy, {**BUSY, "DIRECT": "dmabuf+ordered"}),
        ("cuda_ipc", close_stuck, {"SLOW": "1000000000"}),
        ("rdma", one_by_one, {"DIRECT": "dmabuf+flush"}),
    ],
)  # fmt: skip
def test_what_a_gpu_shows(
    kind: str, scenario: Scenario, settings: dict[str, str], driver: Any, trouble: Trouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    trouble("reset", 0)
    for name, value in settings.items():
        monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
    if scenario is one_by_one:
        trouble("late-gpu-writes", 1)
    with two(kind, MANY if scenario is close_stuck else CHUNKS) as (a, b):
        scenario(a, b, driver)


def test_a_link_between_gpus_that_delivers_wrong_data_is_refused(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_CORRUPT", "1")
    said = refusals("cuda_ipc", trouble, {}, "auto", "auto")
    assert "arrived wrong" in said and "DppConfig(transport='staged')" in said


# GPUDirect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("abilities", "faults", "way"),
    [
        ("dmabuf+ordered", (), "dma-buf, the GPU orders writes"),
        ("dmabuf+flush", ("late-gpu-writes",), "dma-buf, writes are waited for"),
        ("peermem+flush", ("peermem", "late-gpu-writes"), "nvidia-peermem, writes are waited for"),
        ("dmabuf+peermem+ordered", ("no-dmabuf", "peermem"),
         "nvidia-peermem, the GPU orders writes"),
    ],
)  # fmt: skip
def test_the_card_reads_and_writes_gpu_memory(
    abilities: str, faults: tuple[str, ...], way: str, driver: Any, trouble: Trouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_CUDA_DIRECT", abilities)
    for fault in faults:
        trouble(fault, 1)
    said = both_ways("rdma", driver, checksum=True, gpudirect="on")
    assert said.count(f"GPUDirect ({way})") == 2, said


@pytest.mark.parametrize("on", [0, 1])
def test_one_side_with_gpudirect_and_one_without(
    on: int, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DIRECT", "dmabuf+ordered")
    said = both_ways("rdma", driver, checksum=True, by_rank={1 - on: {"gpudirect": "off"}})
    assert "GPUDirect (dma-buf" in said.splitlines()[on], said
    assert "staged in the host's memory, no GPUDirect: DppConfig(gpudirect='off')" in said


@pytest.mark.parametrize(
    ("abilities", "faults", "reasons"),
    [
        ("none", {}, ["neither orders an RDMA card's writes nor can wait for them"]),
        ("ordered", {},
         ["dma-buf: the GPU's driver has none", "nvidia-peermem: the GPU does not support it"]),
        ("dmabuf+peermem+ordered", {"no-dmabuf": 1},
         ["ibv_reg_dmabuf_mr: Operation not supported", "(modprobe nvidia-peermem)"]),
    ],
)  # fmt: skip
def test_what_gpudirect_lacks_is_said_and_an_error_only_when_it_is_asked_for(
    abilities: str, faults: dict[str, int], reasons: list[str], driver: Any, trouble: Trouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_CUDA_DIRECT", abilities)
    asked = refusals("rdma", trouble, faults, "on", "on")
    assert asked.count("DppConfig(gpudirect='on'): ") == 2, asked
    staged = both_ways("rdma", driver)
    assert staged.count("staged in the host's memory, no GPUDirect: ") == 2, staged
    for reason in reasons:
        assert staged.count(reason) == 2 and reason in asked


# The GPU says that it orders writes, so nothing waits for them.
@pytest.mark.parametrize("fault", ["lose-gpu-writes", "late-gpu-writes"])
def test_gpu_memory_that_does_not_show_what_was_written_is_left_to_the_host(
    fault: str, driver: Any, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DIRECT", "dmabuf+ordered")
    for asked in (("on", "on"), ("auto", "on")):
        said = refusals("rdma", trouble, {fault: 1}, *asked)
        assert "DppConfig(gpudirect='on'): " in said and "arrived wrong" in said, said
        assert "DppConfig(gpudirect='off')" in said
    for half in ({}, {1: {"gpudirect": "off"}}):
        trouble(fault, 1)
        said = both_ways("rdma", driver, by_rank=half)
        assert said.count("staged in the host's memory: the GPUDirect link with rank") == 2
        assert "arrived wrong" in said


@pytest.mark.parametrize(
    ("faults", "ways", "asked"),
    [
        # A path that carries nothing is not blamed on GPUDirect.
        ({"lose-writes": 1}, ("auto", "auto"), "transport='rdma'"),
        ({"lose-writes": 1}, ("on", "on"), "gpudirect='on'"),
        # The host's memory in its place is tested, too. Each end writes four pages and two
        # payloads; then the links are set up again.
        ({"lose-gpu-writes": 1, "spare-writes": 12, "lose-writes": 1000}, ("auto", "auto"),
         "transport='rdma'"),
    ],
)  # fmt: skip
def test_a_path_that_carries_nothing_is_named(
    faults: dict[str, int], ways: tuple[str, str], asked: str, trouble: Trouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_CUDA_DIRECT", "dmabuf+ordered")
    said = refusals("rdma", trouble, faults, *ways)
    assert len(re.findall(re.escape(f"DppConfig({asked}): rank "), said)) == 2, said
    assert "over fake0 port 1 has not completed after 1.5 s" in said and "UDP" in said, said
    assert "IOMMU" not in said


@pytest.mark.parametrize(
    ("abilities", "state", "text"),
    [
        ("dmabuf flush", "ok", "fake0: dma-buf, writes are waited for"),
        ("peermem flush", "note", "(modprobe nvidia-peermem)"),
    ],
)
def test_the_doctor_says_what_gpudirect_finds(
    abilities: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DIRECT", abilities)
    found = tuple(probe_gpu_direct())
    assert found[:2] == ("GPUDirect", state) and text in str(found)
