#!/usr/bin/env python
"""Time a step whose stages agree across two hosts, beside one in which each rank decides alone.

    sudo chrt -f 1 python profiling/bench_agreement_hosts.py

Two network namespaces stand for the hosts. A relay joins them and holds each packet for
``--delay-us``. Two replicas of a pipeline of two ranks have one host each; the ranks of a stage run
one order, as ranks that share experts do. Tasks sleep ``--sleep-ms``. The arms take turns: with the
agreement, and without. Ranks that sleep and wait need little of a processor, which a column shows;
others that want the same cores lengthen the steps, unless ``chrt`` puts these ahead. Needs root,
``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from typing import Any

import harness
from sleeping import Naps, SleepingRunner, run_step
from torch.distributed import TCPStore

from megatron.dpp.errors import exit_with
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, Scheduler, parse_cap
from megatron.dpp.transport import TransportOptions, open_transport
from tests.runtime.fork_server import enter_network

_ADDRESSES = ("10.213.72.1", "10.213.72.2")
_BYTES = 128
_STAGES, _REPLICAS = 2, 2
_RANKS = _STAGES * _REPLICAS
_TUNSETIFF, _TUN_NO_PI = 0x400454CA, 0x1001
_DEADLINE = 60.0


def _relay(names: tuple[str, str], delay: float, ready: Any) -> None:
    """Carry packets between the namespaces until the process is ended; each waits ``delay`` s."""
    ends = []
    for name in names:
        enter_network(name)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"dpp0", _TUN_NO_PI))
        ends.append(end)
    ready.set()
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        readable, _, _ = select.select(ends, [], [], 0.0 if waiting else 0.01)
        for end in readable:
            packet = os.read(end, 1 << 16)
            waiting.append((time.perf_counter() + delay, ends[1 - ends.index(end)], packet))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, end, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is down
                os.write(end, packet)


@contextlib.contextmanager
def _two_hosts(delay: float) -> Iterator[tuple[str, str]]:
    names = (f"dpp-bench-{os.getpid()}-0", f"dpp-bench-{os.getpid()}-1")
    relay: Any = None

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=_DEADLINE)

    try:
        for name in names:
            ip("netns", "add", name)
        ready = multiprocessing.Event()
        relay = multiprocessing.Process(target=_relay, args=(names, delay, ready), daemon=True)
        relay.start()
        if not ready.wait(_DEADLINE):
            raise SystemExit("the relay between the namespaces does not start")
        for name, address in zip(names, _ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "dpp0")
            ip("-n", name, "link", "set", "dpp0", "up")
        yield names
    finally:
        if relay is not None:
            relay.kill()
            relay.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _member(
    rank: int, names: tuple[str, str], port: int, args: Namespace
) -> list[list[tuple[float, float]]]:
    """Seconds of each step of this rank, of the clock and of processors, by arm: together, then
    alone.
    """
    replica = rank % _REPLICAS
    enter_network(names[replica])
    os.environ["GLOO_SOCKET_IFNAME"] = "dpp0"
    store = TCPStore(_ADDRESSES[0], port, is_master=rank == 0)
    topology = Topology(tuple(range(replica, _RANKS, _REPLICAS)), rank // _REPLICAS, args.chunks)
    specs = topology.channels([_BYTES], [_BYTES], 2)
    stage = [rank - replica, rank - replica + 1]
    found: list[list[tuple[float, float]]] = [[], []]
    with open_transport(
        specs, rank=rank, store=store, board_ranks=stage,
        board_counters=2 * sum(spec.destination == rank for spec in specs),
        options=TransportOptions(node_ips=_ADDRESSES[replica]),
    ) as transport:  # fmt: skip
        links, board = Links(transport, topology), transport.board
        for step in range(2 * (args.rounds + 1)):
            transport.board = board if step % 2 == 0 else None
            harness.meet(store, rank, _RANKS, f"step {step}")
            begin, used = time.perf_counter(), time.process_time()
            _step(args, links, step, topology)
            took = time.perf_counter() - begin, time.process_time() - used
            if step >= 2:  # the first of each is untimed
                found[step % 2].append(took)
        harness.meet(store, rank, _RANKS, "end")
    harness.leave(store, rank, _RANKS)
    return found


def _step(args: Namespace, links: Links, number: int, topology: Topology) -> None:
    v = args.chunks
    geometry = Geometry(_STAGES, topology.rank, v, args.microbatches, w_pieces=(1,) * v)
    scheduler = Scheduler(geometry, cap=parse_cap("auto", geometry).chunks, split_backward=True)
    runner = SleepingRunner(Naps(args, v, number, fused=False))
    run_step(links, scheduler, runner, number)


def main() -> int:
    """Print the median step of each arm."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # removes the hosts
    args = harness.new_parser(
        __doc__, microbatches=16, chunks=2, rounds=10, sleep_ms=(5.0, "time of a task"),
        delay_us=(50.0, "time of a packet between the hosts"),
    ).parse_args()  # fmt: skip
    args.inject = ""
    tasks = 3 * args.chunks * args.microbatches
    most = 5 * _DEADLINE + 4 * args.rounds * tasks * args.sleep_ms * 2e-3
    with _two_hosts(args.delay_us * 1e-6) as names:
        ranks = harness.run_members(_member, _RANKS, names, harness.free_port(), args, timeout=most)
    rows, medians, busy = [], [], []
    for arm in (0, 1):
        steps = list(zip(*(rank[arm] for rank in ranks), strict=True))
        longest = [max(took for took, _ in step) for step in steps]
        medians.append(statistics.median(longest))
        busy.append(sum(used for step in steps for _, used in step) / len(ranks) / sum(longest))
    for name, step, share in zip(
        ("one order for both hosts", "each alone"), medians, busy, strict=True
    ):
        over = f"{step / medians[1]:.4f}"
        rows.append((name, f"{step * 1e3:.2f}", f"{step / tasks * 1e6:.1f}", over, f"{share:.1%}"))
    harness.print_table("decisions | step, ms | per task, us | over alone | core per rank", rows)
    return 0


if __name__ == "__main__":
    exit_with(main)
