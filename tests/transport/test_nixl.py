"""NIXL in processes of their own: how they end, and where the package is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.direction import Direction
from megatron.dpp.errors import (
    PeerDead,
    ProtocolError,
    SetupError,
    TransportError,
    TransportUnavailable,
)
from megatron.dpp.transport import nixl_agent, open_transport
from megatron.dpp.transport.base import ChannelSpec, Transport
from megatron.dpp.transport.kinds import nixl
from megatron.dpp.transport.kinds.nixl import NixlTransport
from megatron.dpp.transport.native import NativeTransport
from megatron.dpp.transport.nixl_agent import NixlAgent, Slots
from tests.conftest import REPOSITORY
from tests.transport.kinds import (
    NIXL,
    PATIENCE,
    close_and_wait,
    forked,
    of_rank,
    open_from_file,
    opened,
    pair,
    take_next,
)

ENDS_OPEN = """
import sys, torch
from tests.transport.kinds import open_from_file, pair
transport = open_from_file("nixl", pair(), int(sys.argv[1]), sys.argv[2])
transport.put(0, torch.ones(9), iteration=0, microbatch=0)
while not transport.poll()[0]:
    assert transport.wait(30.0)
print(float(transport.take(0).tensor.sum()))
transport.flush(30.0)
"""


def test_a_process_without_the_package_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportUnavailable, match=r"transport='nixl'\): .* pip install"):
        open_transport(of_rank(pair(), 0), rank=0, store=HashStore(), kind=NIXL)


# Without the package ------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
IN = [
    ChannelSpec(0, 1, chunk, Direction.FORWARD, size, depth)
    for chunk, (size, depth) in enumerate([(1, 2), (PAGE, 3), (PAGE + 1, 1)])
]


def test_slots_lie_on_pages_of_their_own() -> None:
    slots = Slots(1, IN)
    assert slots.strides == [PAGE, PAGE, 2 * PAGE] and len(slots.memory) == 7 * PAGE
    places = [
        slots.slot(channel, number, spec.slot_bytes).data_ptr() - slots.memory.data_ptr()
        for channel, spec in enumerate(IN)
        for number in range(2 * spec.depth)
    ]
    assert [place // PAGE for place in places] == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4, 5, 5]
    slots.slot(2, 0, PAGE + 1).fill_(7)
    assert int((slots.memory == 7).sum()) == PAGE + 1
    slots.close()
    assert not slots.memory.any()


@pytest.mark.parametrize("room", [7 * PAGE, 7 * PAGE - 1])
def test_slots_ask_for_room_first(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = SimpleNamespace(memory_room=lambda *_: (room, "the group is full"))
    monkeypatch.setattr(nixl_agent, "load_native", lambda: native)
    if room == 7 * PAGE:
        Slots(1, IN).close()
        return
    with pytest.raises(SetupError, match=rf"no memory for {7 * PAGE} bytes .*the group is full"):
        Slots(1, IN)


class Agents:
    """Agents of one process, which write at once and are done when they may.

    ``damaged``: bytes arrive wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.damaged = False
        self.num_writes = 0
        self.given_up: list[int] = []
        monkeypatch.setattr(nixl, "missing_part", lambda kind: None)
        monkeypatch.setattr(nixl, "NixlAgent", lambda name, slots: self)

    def description(self) -> str:
        return "here"

    def connect(self, description: str) -> str:
        return description

    def write(self, source: torch.Tensor, agent: str, address: int) -> int:
        assert agent == "here"
        ctypes.memmove(address, source.data_ptr(), source.nbytes)
        if self.damaged:
            ctypes.memset(address, 0xFF, 1)
        self.num_writes += 1
        return self.num_writes

    def is_written(self, handle: int) -> bool:
        return not self.held

    def close(self, begun: list[int]) -> None:
        self.given_up += begun


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Agents:
    return Agents(monkeypatch)


def until_pending(transport: Transport, count: int) -> None:
    while transport.pending() > count:
        transport.poll()
        assert transport.wait(PATIENCE)


def test_a_channel_has_as_many_puts_on_their_way_as_slots(agents: Agents) -> None:
    with opened(NIXL, pair(depth=2)) as (a, b):
        for number in range(5):
            a.put(0, torch.full((9,), float(number)), iteration=0, microbatch=number)
        for taken in range(3):
            until_pending(a, 3 - taken)
            assert agents.num_writes == 2 + taken
            assert take_next(b, 0, taken).tensor.tolist() == [float(taken)] * 9


def test_messages_may_be_taken_while_others_arrive(agents: Agents) -> None:
    """The thread that hears of them looks at the counts between any two lines of a take."""
    done = threading.Event()

    def slowly(frame: Any, *_: Any) -> Any:
        if frame.f_code.co_filename != nixl.__file__:
            return None
        time.sleep(2e-4)
        return slowly

    def send(transport: Transport) -> None:
        for number in range(1000):
            if not done.wait(2e-4):
                transport.put(1, torch.ones(1), iteration=0, microbatch=number)

    with opened(NIXL, pair(64, depth=1000)) as (a, b), ThreadPoolExecutor(1) as pool:
        for number in range(32):
            a.put(0, torch.ones(1), iteration=0, microbatch=number)
        while b.poll()[0] < 32:
            assert b.wait(PATIENCE)
        others, before = pool.submit(send, a), sys.gettrace()
        sys.settrace(slowly)
        try:
            assert [b.take(0).microbatch for _ in range(32)] == list(range(32))
            b.poll()
        finally:
            sys.settrace(before)
            done.set()
        others.result(PATIENCE)


def test_a_closed_transport_drains_while_there_is_a_reader(agents: Agents) -> None:
    with opened(NIXL, pair()) as (a, b), ThreadPoolExecutor(1) as pool:
        agents.held = True
        a.put(0, torch.ones(9), iteration=0, microbatch=0)
        closing = pool.submit(a.close)
        agents.held = False
        assert take_next(b, 0, 0).microbatch == 0
        closing.result(PATIENCE)
        assert not agents.given_up


def test_a_closed_transport_gives_up_what_is_not_written_in_time(agents: Agents) -> None:
    with opened(NIXL, pair()) as (a, _):
        agents.held = True
        a.put(0, torch.ones(9), iteration=0, microbatch=0)
        a.close()
        assert agents.given_up == [1]


GOOD = zlib.crc32(torch.ones(3).numpy().data)


@pytest.mark.parametrize(
    ("note", "fault"),
    [
        ([], "not enough values"),
        ([1, 99, -1, 3], "list index out of range"),
        ([1, -1, -1, 3], "a broken announcement"),
        ([1, 0, -1, -3], "a broken announcement"),
        ([1, 0, -1, *[1] * 9], "a broken announcement"),
        ([1, 0, -1, 1 << 40], "does not fit 65536 bytes"),
        ([1, 0, 7, 3], "the checksum of microbatch 5 is wrong"),
        ([5, 0, -1, 3], ""),
        ([5, 0, GOOD, 3], ""),
    ],
)
def test_an_announcement_is_checked_before_it_is_believed(
    note: list[int], fault: str, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken one ends the run."""
    put = NativeTransport.put

    def announce(self: NativeTransport, channel: int, tensor: torch.Tensor, **labels: Any) -> None:
        if labels["microbatch"] == 5:
            labels["microbatch"], tensor = 5, torch.tensor(note, dtype=torch.int64)
        put(self, channel, tensor, **labels)

    monkeypatch.setattr(NativeTransport, "put", announce)
    with opened(NIXL, pair()) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=5)
        if not fault:
            found = take_next(b, 0, 0)
            assert found.tensor.tolist() == [1.0] * 3
            assert (found.microbatch, found.sent_ns) == (5, 5)
            return
        with pytest.raises(ProtocolError, match=fault):
            take_next(b, 0, 0)
        with pytest.raises(ProtocolError, match=fault):
            b.poll()
        with pytest.raises(PeerDead, match=f"rank 1 gave up: .*{fault}"):
            while True:
                a.poll()
                assert a.wait(PATIENCE)


def test_a_checksum_notices_bytes_that_arrive_wrong(agents: Agents) -> None:
    with opened(NIXL, pair(), checksum=True) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=5)
        assert take_next(b, 0, 0).microbatch == 5
        agents.damaged = True
        a.put(0, torch.ones(3), iteration=0, microbatch=6)
        with pytest.raises(ProtocolError, match="the checksum of microbatch 6 is wrong"):
            take_next(b, 0, 1)


def test_a_write_ends_with_its_handle_and_nixl_leaves_logging_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[int] = []
    inner = SimpleNamespace(
        createBackend=lambda *_: "UCX", registerMem=lambda *_: None,
        getXferStatus=lambda handle: handle, releaseXferReq=released.append,
    )  # fmt: skip
    module = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace, nixlAgent=lambda *_: inner, DRAM_SEG=0, NIXL_IN_PROG=1,
        nixlRegDList=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setenv("UCX_MODULES", "")

    def load(name: str) -> Any:
        assert name == "nixl._bindings"
        logging.raiseExceptions = False
        return module

    monkeypatch.setattr(nixl_agent.importlib, "import_module", load)
    agent = NixlAgent("a", [])
    assert logging.raiseExceptions
    assert (agent.is_written(1), released) == (False, [])
    assert (agent.is_written(0), released) == (True, [0])


# With it ------------------------------------------------------------------------------------------


@pytest.mark.nixl
def test_a_process_that_never_closes_ends_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_OPEN]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], cwd=REPOSITORY,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=2 * PATIENCE)
            assert (rank.returncode, output.splitlines()[-1]) == (0, "9.0"), output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.nixl
def test_puts_to_a_rank_that_has_left_stay_pending() -> None:
    with opened(NIXL, pair(depth=1)) as (a, b):
        close_and_wait(b, a)
        a.put(0, torch.ones(1 << 10), iteration=0, microbatch=0)
        with pytest.raises(PeerDead, match=r"1 puts are pending.*rank 1 has closed its transport"):
            a.flush(0.2)


@pytest.mark.nixl
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_hangs_or_dies_holds_no_close_up(how: signal.Signals, tmp_path: Path) -> None:
    large = torch.ones(1 << 24, dtype=torch.uint8)

    def body(rank: int, path: str, results: Any) -> None:
        transport = open_from_file(NIXL, pair(large.nbytes), rank, path)
        results.put((rank, "open"))
        if rank == 1:
            time.sleep(2 * PATIENCE)
        while not (Path(path).parent / "struck").exists():
            time.sleep(0.01)
        for number in range(2):
            transport.put(0, large, iteration=0, microbatch=number)
        transport.close()
        results.put((rank, "closed"))

    with forked(2, body, tmp_path) as (ranks, results):
        assert {results.get(PATIENCE)[0] for _ in ranks} == {0, 1}
        os.kill(ranks[1].pid or 0, how)
        if how == signal.SIGSTOP:
            while Path(f"/proc/{ranks[1].pid}/stat").read_text().split()[2] != "T":
                time.sleep(0.01)
        (tmp_path / "struck").touch()
        assert results.get(PATIENCE) == (0, "closed")


@pytest.mark.nixl
def test_a_set_up_that_fails_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(agent: NixlAgent, description: str) -> str:
        found.append(shared_bytes())
        raise RuntimeError("NIXL_ERR_BACKEND")

    found = [shared_bytes()]
    monkeypatch.setattr(NixlAgent, "connect", fail)
    with pytest.raises(TransportError, match="NIXL_ERR_BACKEND"), opened(NIXL, pair(8 << 20)):
        pass
    assert max(found) - found[0] > 40 << 20
    assert shared_bytes() - found[0] < 8 << 20


def shared_bytes() -> int:
    """Shared memory of this process that has pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


@pytest.mark.nixl
def test_a_peer_that_dies_during_the_set_up_is_named(tmp_path: Path) -> None:
    def fail_after_its_death(transport: Any, request: Any) -> None:
        while not transport._control._native.failure():
            time.sleep(0.01)
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    def die(transport: Any, request: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def body(rank: int, path: str, results: Any) -> None:
        NixlTransport._exchange_slots = die if rank else fail_after_its_death  # type: ignore[method-assign]
        try:
            open_from_file(NIXL, pair(), rank, path)
        except TransportError as error:
            results.put((type(error).__name__, str(error)))

    with forked(2, body, tmp_path) as (_, results):
        name, text = results.get(timeout=PATIENCE)
    assert name == "PeerDead" and "rank 1 (pid" in text
