#!/usr/bin/env python
"""Time the transport's kinds side by side in one run.

    python profiling/bench_transport.py [--sizes 4K 64K 1M 16M] [--json FILE]
    python profiling/bench_transport.py --kinds tcp --between-namespaces

Two processes play ping-pong from Python, on one host or, with ``--between-namespaces``, in two
network namespaces joined by a veth pair (needs root). All rows of a size take turns, each after an
untimed pass. Per kind there are two medians of one way: from ``put`` to
the tensor that ``take`` returned, and ("seen") from ``put`` to the moment at which the receiver saw
that the message is complete, which leaves out the copy out of the slot. "cpu" is the processor time
of both ranks per message, all threads and spinning included: other load changes it little. gloo's
own send and recv are measured beside them. ``--kinds nixl:tcp`` is NIXL over UCX's tcp (a value of
``UCX_TLS``). Two floors: "copy" between two buffers of one process, and "copy to peer" into shared
memory that another process has read since, whose cache lines have to come from that process's core
first. "copies" is twice the latter: what a message over ``shm`` costs at least until it is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import mmap
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from megatron.dpp.errors import ConfigError, exit_with
from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions, open_transport

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SECONDS_PER_POINT = 0.5
PATIENCE = 120.0
"""Seconds after which the processes of one row are given up."""
LOOPBACK = ("127.0.0.1", "127.0.0.1")


SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def _human(count: int) -> str:
    for unit, scale in reversed(UNITS.items()):
        if count >= scale:
            return f"{count / scale:g} {unit}iB"
    return f"{count} B"


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"size {text}: expected a number with K, M or G")
    return int(match[1]) * UNITS.get(match[2], 1)


def time_rounds(one_round: Callable[[], None], halves: int = 1) -> float:
    """Median seconds of one way; a round is ``halves`` ways."""
    return statistics.median(harness.sample(one_round, seconds=SECONDS_PER_POINT)) / halves


def measure_copy(num_bytes: int) -> float:
    """Seconds of one copy into memory that exists."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)

    def one_round() -> None:
        target.copy_(source)

    return time_rounds(one_round)


def measure_copy_to_peer(num_bytes: int) -> float:
    """Seconds of one copy into shared memory whose content another process has just read."""
    memory, flag = mmap.mmap(-1, num_bytes), mmap.mmap(-1, 2)
    shared = torch.frombuffer(memory, dtype=torch.uint8)
    private = torch.ones(num_bytes, dtype=torch.uint8)

    def read_forever() -> None:
        while True:
            while flag[0] == flag[1]:
                pass
            private.copy_(shared)
            flag[1] = flag[0]

    def one_round() -> float:
        start = time.perf_counter()
        shared.copy_(private)
        seconds = time.perf_counter() - start
        flag[0] ^= 1
        while flag[0] != flag[1]:
            pass
        return seconds

    reader = multiprocessing.get_context("fork").Process(target=read_forever, daemon=True)
    reader.start()
    try:
        samples = harness.sample(one_round, seconds=SECONDS_PER_POINT / 2, warm_up=0)
    finally:
        reader.kill()
        reader.join()
    return statistics.median(samples[len(samples) // 5 :])


class OurKind:
    """Ping-pong over one of the transport's kinds. A tensor of one element ends the game."""

    def __init__(self, kind: str, rank: int, num_bytes: int, path: str, address: str) -> None:
        channels = [
            ChannelSpec(0, 1, 0, Direction.FORWARD, num_bytes),
            ChannelSpec(1, 0, 0, Direction.BACKWARD, num_bytes),
        ]
        store = dist.FileStore(path)
        options = TransportOptions(setup_timeout=PATIENCE / 4, node_ips=address)
        self.transport = open_transport(
            channels, rank=rank, store=store, kind=kind, options=options
        )
        self.taken = 0
        self.seen_ns: list[int] = []

    def send(self, tensor: torch.Tensor) -> None:
        self.transport.put(0, tensor, iteration=0, microbatch=0)

    def receive(self) -> torch.Tensor:
        while self.transport.poll()[0] == self.taken:
            self.transport.wait(10.0)
        self.taken += 1
        message = self.transport.take(0)
        self.seen_ns.append(message.arrived_ns - message.sent_ns)
        return message.tensor

    def seen(self) -> float | None:
        """Median seconds from put to seen, of the messages received here."""
        return statistics.median(self.seen_ns) * 1e-9

    def close(self) -> None:
        self.transport.flush(PATIENCE / 4)
        self.transport.close()


class Gloo:
    """Ping-pong over torch.distributed's own gloo send and receive."""

    def __init__(self, kind: str, rank: int, num_bytes: int, path: str, address: str) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=PATIENCE / 4)
        self.group = dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, options)
        self.peer = 1 - rank
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor) -> None:
        if tensor.numel() != self.buffer.numel():  # gloo has no sizes of its own
            tensor = torch.full_like(self.buffer, 255)
        self.group.send([tensor], self.peer, 0).wait()

    def receive(self) -> torch.Tensor:
        self.group.recv([self.buffer], self.peer, 0).wait()
        return self.buffer[:1] if self.buffer[0] == 255 else self.buffer

    def seen(self) -> float | None:
        """gloo says nothing before everything is received."""
        return None

    def close(self) -> None:
        pass


def _play(player: Any, rank: int, num_bytes: int) -> tuple[float | None, float]:
    """Median seconds of one way, where this rank knows it, and processor seconds per message."""
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    began, messages = time.process_time(), 0

    def one_round() -> None:
        nonlocal messages
        player.send(tensor)
        player.receive()
        messages += 2

    if rank == 0:
        seconds = time_rounds(one_round, 2)
        cpu = (time.process_time() - began) / messages
        player.send(torch.ones(1, dtype=torch.uint8))
        return seconds, cpu
    while player.receive().numel() != 1:
        player.send(tensor)
        messages += 2
    return None, (time.process_time() - began) / messages


def _player(rank: int, kind: str, num_bytes: int, path: str, hosts: Any) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    addresses = LOOPBACK
    if hosts is not None:
        hosts.enter(rank)
        addresses = hosts.addresses
    arm = Gloo if kind == "gloo" else OurKind
    kind, _, ucx = kind.partition(":")
    if ucx:
        os.environ["UCX_TLS"] = ucx
    player = arm(kind, rank, num_bytes, path, addresses[rank])
    seconds, cpu = _play(player, rank, num_bytes)
    seen = player.seen()
    player.close()
    return seconds, seen, cpu


def measure_pair(kind: str, num_bytes: int, hosts: Any) -> tuple[float, float | None, float]:
    """Median one-way seconds between two processes, until taken and until seen, and the processor
    seconds of both per message.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (kind, num_bytes, f"{folder}/store", hosts)
        members = harness.run_members(_player, 2, *arguments, method="fork", timeout=PATIENCE)
    (taken, seen, cpu), (_, _, others_cpu) = members
    return taken, seen, cpu + others_cpu


Table = dict[str, dict[int, float]]


def measure_all(sizes: Sequence[int], kinds: Sequence[str], rounds: int, hosts: Any) -> Table:
    """Median seconds by row and size; the rows of one size take turns."""
    table: Table = {}
    for size in sizes:
        arms: dict[str, Callable[[], Any]] = {
            "copy": functools.partial(measure_copy, size),
            "copy to peer": functools.partial(measure_copy_to_peer, size),
        }
        for kind in ("gloo", *kinds):
            arms[kind] = functools.partial(measure_pair, kind, size, hosts)
        for name, found in harness.take_turns(arms, rounds).items():
            taken = [one[0] if isinstance(one, tuple) else one for one in found]
            seen = [one[1] for one in found if isinstance(one, tuple) and one[1] is not None]
            table.setdefault(name, {})[size] = statistics.median(taken)
            if seen:
                table.setdefault(f"{name} seen", {})[size] = statistics.median(seen)
            if cpu := [one[2] for one in found if isinstance(one, tuple)]:
                table.setdefault(f"{name} cpu", {})[size] = statistics.median(cpu)
        table.setdefault("copies", {})[size] = 2 * table["copy to peer"][size]
    return table


def print_table(table: Table) -> None:
    """One way in microseconds, and as a multiple of the plain copy."""
    sizes = list(table["copy"])
    harness.print_table(
        f"one way, us (x copy) | {' | '.join(map(_human, sizes))}",
        (
            (name, *(f"{row[s] * 1e6:.1f} ({row[s] / table['copy'][s]:.2f})" if s in row else ""
                     for s in sizes))
            for name, row in table.items()
        ),
    )  # fmt: skip


@contextlib.contextmanager
def hosts_of(arguments: argparse.Namespace) -> Iterator[Any]:
    """Two network namespaces, or None for one host."""
    if not arguments.between_namespaces:
        yield None
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise ConfigError("--between-namespaces needs root and the ip command")
    from tests.netns import two_hosts

    with two_hosts() as hosts:
        yield hosts


def main() -> int:
    parser = harness.new_parser(
        __doc__,
        between_namespaces=(False, "two network namespaces, joined by a veth pair"),
        rounds=(3, "turns of each row at each size"),
    )
    parser.add_argument("--sizes", nargs="+", type=_parse_size, default=SIZES)
    parser.add_argument("--kinds", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds to this file")
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, PyTorch {torch.__version__}")
    with hosts_of(arguments) as hosts:
        table = measure_all(arguments.sizes, arguments.kinds, arguments.rounds, hosts)
    print_table(table)
    harness.write_json(arguments.json, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
