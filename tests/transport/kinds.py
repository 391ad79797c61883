"""The kinds that go through the conformance suite, and how a test opens them.

A new kind joins with one entry in ``KINDS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import glob
import hashlib
import hmac
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from megatron.dpp.errors import TransportError
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    Transport,
    TransportOptions,
    meet,
    native,
    open_transport,
)
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.kinds import AUTO, find
from tests.fake_network import FakeNetwork

GPU_KINDS = ("cuda_ipc", "staged")
HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))
"""There is a driver of GPUs, which cannot be replaced; CUDA_VISIBLE_DEVICES may hide them all."""
NIXL = "nixl"
KINDS = ("fake", "shm", "tcp", "rdma", NIXL, *GPU_KINDS)
NATIVE_KINDS = ("shm", "tcp")
IN_PROCESS_KINDS = tuple(kind for kind in KINDS if kind not in ("fake", NIXL))
"""``rdma`` runs over a double of libibverbs that knows one process only."""
NIXL_KIND = pytest.param(NIXL, marks=pytest.mark.nixl)
"""For parameters: skipped where the package is not installed."""
REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
"""Seconds after which a test gives up; never reached when all is well."""


def build_fake_verbs(folder: Path) -> Path:
    """The double of libibverbs, as ``folder``/libibverbs.so.1."""
    return build_double("fake_verbs.cc", folder / "libibverbs.so.1")


def build_fake_cuda(folder: Path) -> Path:
    """The double of the CUDA driver, as ``folder``/libcuda.so.1."""
    return build_double("fake_cuda.cc", folder / "libcuda.so.1")


def build_double(source: str, library: Path) -> Path:
    """Compile a double of csrc/tests, unless that was done for the same sources before."""
    csrc = REPOSITORY / "csrc"
    read = [csrc / "tests" / source, *sorted(csrc.rglob("*.h"))]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()[:16]
    made = REPOSITORY / "build" / "doubles" / f"{name}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{csrc}"]
        command += [f"-Wl,-soname,{library.name}", str(read[0]), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True, timeout=600)
        scratch = made.with_suffix(f".{os.getpid()}")
        shutil.copy(library, scratch)
        scratch.replace(made)
    shutil.copy(made, library)
    return library


@functools.lru_cache(maxsize=1)
def load_fake_verbs() -> ctypes.CDLL:
    """csrc/tests/fake_verbs.cc in the place of this process's libibverbs: what is loaded under that
    name first is what the transport finds.
    """
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_fake_verbs(Path(folder))))


@functools.lru_cache(maxsize=1)
def fake_verbs() -> ctypes.CDLL:
    """The double of libibverbs, which the transport has found. Skips where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the double of libibverbs with")
    fake = load_fake_verbs()
    fake.fake_verbs_seen.argtypes, fake.fake_verbs_seen.restype = (ctypes.c_char_p,), ctypes.c_long
    fake.fake_verbs_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
    ports, _ = native.load_native().rdma_ports()
    assert [port["device"] for port in ports[:1]] == ["fake0"], "another libibverbs was first"
    return fake


@functools.lru_cache(maxsize=1)
def fake_cuda() -> ctypes.CDLL:
    """csrc/tests/fake_cuda.cc in the place of this process's CUDA driver, likewise. Skips where
    there is a GPU: test_cuda.py then tests the same kinds over the real one.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the double of the CUDA driver with")
    if HAS_GPU:
        pytest.skip("a real GPU is here")
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_fake_cuda(Path(folder))))


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """The transport takes the CPU for cuda:0, and CPU tensors for CUDA tensors."""
    facts = functools.partial(opening.gpu_facts, device=torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        for module in (native, opening):
            patch.setattr(module, "device_index", lambda device: 0)
        patch.setattr(opening, "gpu_facts", lambda library, device: facts(library))
        yield


def pair(slot_bytes: int = 1 << 16, depth: int = 2) -> list[ChannelSpec]:
    """Two channels from rank 0 to rank 1 and one back."""
    return [
        ChannelSpec(0, 1, 0, Direction.FORWARD, slot_bytes, depth),
        ChannelSpec(0, 1, 1, Direction.FORWARD, slot_bytes, depth),
        ChannelSpec(1, 0, 0, Direction.BACKWARD, slot_bytes, depth),
    ]


def of_rank(channels: Sequence[ChannelSpec], rank: int) -> list[ChannelSpec]:
    """The channels that concern one rank."""
    return [spec for spec in channels if rank in (spec.source, spec.destination)]


@contextlib.contextmanager
def prepared(kind: str) -> Iterator[None]:
    """Replaces devices that a kind needs and this machine may lack."""
    if kind in ("rdma", NIXL, AUTO):  # NIXL's small channels are of any kind
        fake_verbs()
    if kind not in GPU_KINDS:
        yield
        return
    fake_cuda()
    with cpu_as_gpu():
        yield


_own_host = threading.local()


@contextlib.contextmanager
def several_hosts() -> Iterator[Callable[[str], None]]:
    """Lets each thread name the host that its transport takes itself to be on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "host_identity", lambda: _own_host.name)
        yield lambda name: setattr(_own_host, "name", name)


@contextlib.contextmanager
def opened(
    kind: str, channels: Sequence[ChannelSpec], *, counters: int = 0,
    by_rank: Mapping[int, dict[str, Any]] = types.MappingProxyType({}), **options: Any,
) -> Iterator[list[Transport]]:  # fmt: skip
    """All ranks' transports in this process. With ``counters``, all ranks share a board. Each rank
    of a kind between hosts, or of ``auto``, takes itself to be on a host of its own.

    Args:
        by_rank: options of single ranks, beside those of all.
    """
    ranks = sorted({spec.source for spec in channels} | {spec.destination for spec in channels})
    board: dict[str, Any] = {"board_ranks": ranks, "board_counters": counters} if counters else {}
    with prepared(kind), several_hosts() as name_host, contextlib.ExitStack() as stack:
        if kind == "fake":
            network = FakeNetwork(channels, seed=1, delay=0.001)
            transports: list[Transport] = [network.transport(rank, **board) for rank in ranks]
        else:
            store, apart = HashStore(), kind == AUTO or find(kind).between_hosts
            address = {"node_ips": "127.0.0.1"} if apart else {}
            given = {"setup_timeout": PATIENCE, **address, **options}

            def open_one(rank: int) -> Transport:
                name_host(f"host {rank}" if apart else meet.host_identity())
                settings = TransportOptions(**{**given, **by_rank.get(rank, {})})
                mine = of_rank(channels, rank)
                return open_transport(
                    mine, rank=rank, store=store, kind=kind, options=settings, **board
                )

            with ThreadPoolExecutor(len(ranks)) as pool:
                transports = list(pool.map(open_one, ranks))
        # All at once: a rank may wait for the other side.
        pool = stack.enter_context(ThreadPoolExecutor(len(ranks)))
        for transport in transports:
            stack.callback(pool.submit, transport.close)
        yield transports


class Library:
    """The extension with transports that ``wrap`` makes of its own, given the rank."""

    def __init__(self, wrap: Callable[[Any, int], Any]) -> None:
        self._own, self._wrap = native.load_native(), wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def Transport(self, **options: Any) -> Any:
        return self._wrap(self._own.Transport(**options), options["rank"])


class Wrapped:
    """A transport of the extension; a call named ``fails`` raises ``error``, before or after its
    work."""

    def __init__(self, made: Any, fails: str, error: BaseException, *, after: bool = False) -> None:
        self._made, self.fails, self._error, self._after = made, fails, error, after

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._made, name)
        if name != self.fails:
            return own

        def fail(*given: Any, **options: Any) -> None:
            if self._after:
                own(*given, **options)
            raise self._error

        return fail


def close_and_wait(leaves: Transport, stays: Transport) -> None:
    """Close a rank's transport, and wait until its peer knows that it has left."""
    leaves.close()
    deadline = time.monotonic() + PATIENCE
    while not stays.departed(leaves.rank):
        assert time.monotonic() < deadline
        stays.poll()
        stays.wait(0.1)


def until_failure(transport: Transport) -> TransportError:
    """The error that a waiting rank gets."""
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            transport.poll()
            transport.wait(0.2)
    except TransportError as error:
        return error
    raise AssertionError("no failure was noticed")


def take_next(transport: Transport, channel: int, already: int) -> Any:
    """Wait for message number ``already`` of a channel and take it."""
    while transport.poll()[channel] <= already:
        assert transport.wait(PATIENCE), f"nothing arrived on {transport.incoming[channel]}"
    return transport.take(channel)


def until_arrived(transport: Transport) -> None:
    """Wait for the first message of channel 0, and leave it there."""
    while transport.poll()[0] == 0:
        assert transport.wait(PATIENCE)


def carries(sender: Transport, receiver: Transport, number: int = 0) -> None:
    """Message ``number`` of channel 0 arrives."""
    sender.put(0, torch.ones(3), iteration=0, microbatch=number)
    assert take_next(receiver, 0, number).microbatch == number


_KEPT: list[bool] = []
os.register_at_fork(after_in_child=lambda: gc.freeze() if _KEPT else None)


@contextlib.contextmanager
def inheritance_kept() -> Iterator[None]:
    """Processes forked within never collect what they inherit. A gloo group that an earlier test
    left in a reference cycle waits in its destructor for a thread that only its own process has.
    """
    _KEPT.append(True)
    try:
        yield
    finally:
        _KEPT.pop()


class Results:
    """The reports of processes to their test. No lock stands between them: a process that is killed
    while it writes neither tears a message nor silences others, as a multiprocessing queue would.
    """

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def put(self, result: Any) -> None:
        """Send one result; whole, or not at all."""
        self._writing.send(pickle.dumps(result))

    def get(self, timeout: float) -> Any:
        """The next result; a ``TimeoutError`` after ``timeout`` seconds."""
        self._reading.settimeout(timeout)
        return pickle.loads(self._reading.recv(1 << 20))

    def close(self) -> None:
        """Close both ends."""
        self._reading.close()
        self._writing.close()


@contextlib.contextmanager
def forked(
    count: int, body: Callable[[int, str, Results], None], path: Path
) -> Iterator[tuple[list[BaseProcess], Results]]:
    """``body(rank, store path, results)`` in processes of their own, which end with the block."""
    context = multiprocessing.get_context("fork")
    results = Results()

    def run(rank: int) -> None:
        faulthandler.dump_traceback_later(PATIENCE, file=sys.__stderr__, exit=True)
        torch.set_num_threads(1)
        body(rank, str(path / "store"), results)

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(count)]
    with inheritance_kept():
        for process in processes:
            process.start()
    try:
        yield processes, results
    finally:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
        results.close()


def open_from_file(
    kind: str, channels: Sequence[ChannelSpec], rank: int, path: str, **options: Any
) -> Transport:
    """One rank's transport in a process of its own."""
    settings = TransportOptions(**{"setup_timeout": PATIENCE, **options})
    mine = of_rank(channels, rank)
    return open_transport(mine, rank=rank, store=FileStore(path), kind=kind, options=settings)


def proof_of(
    side: str, connector: int, acceptor: int, first: str, second: str, purpose: str, token: bytes
) -> str:
    """The proof of a set-up connection, as the wire has it."""
    said = json.dumps([connector, acceptor, first, second, purpose]).encode()
    return hmac.new(token, side.encode() + b"\0" + said, "sha256").hexdigest()
