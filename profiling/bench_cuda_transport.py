#!/usr/bin/env python
"""Time the GPU transports beside NCCL's send and receive and plain copies.

    python profiling/bench_cuda_transport.py [--out FILE] [--quick]

Two processes, one GPU each. One way = half a ping-pong, medians, microseconds, random bytes:

- ``arrive``: put() until the receiver's poll() shows it; beside ``peer copy`` (and synchronise).
- ``taken``: until take()'s tensor is there (synchronised); beside NCCL's receive (synchronised).

A GEMM loop beside 16 MiB per GEMM in both directions shows what compute pays.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist

from megatron.dpp.errors import exit_with
from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions, open_transport

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
KINDS = ("cuda_ipc", "staged")
DEADLINE = 300.0
"""Seconds after which stacks are printed."""
WARM_UP = 10
GEMM = 8192
GEMMS = 150
GEMM_WARM_UP = 20
BESIDE_BYTES = 16 << 20

Table = dict[str, list[float]]
"""Microseconds of one way per size."""


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def micros(one_round: Callable[[], float], size: int) -> float:
    """Median microseconds of as many rounds as suit a size."""
    count = 150 if size <= 1 << 20 else 60 if size <= 64 << 20 else 25
    found = harness.sample(one_round, least=count, most=count, warm_up=WARM_UP)
    return statistics.median(found) * 1e6


class Ours:
    """A transport with one channel each way, and its ping-pongs."""

    def __init__(self, kind: str, rank: int, slot: int) -> None:
        specs = [ChannelSpec(i, 1 - i, 0, Direction(i), slot) for i in (0, 1)]
        store = dist.distributed_c10d._get_default_store()
        options = TransportOptions(timeout=30)
        self.rank = rank
        self.transport = open_transport(
            specs, rank=rank, store=store, device="cuda", kind=kind, options=options
        )
        self.count = 0
        self.put_seconds: list[float] = []
        self.take_seconds: list[float] = []

    def put(self, tensor: torch.Tensor) -> None:
        start = time.perf_counter()
        self.transport.put(0, tensor, iteration=0, microbatch=0)
        self.put_seconds.append(time.perf_counter() - start)

    def arrive(self) -> None:
        while self.transport.poll()[0] <= self.count:
            self.transport.wait(5.0)
        self.count += 1

    def take(self) -> torch.Tensor:
        start = time.perf_counter()
        tensor = self.transport.take(0).tensor
        self.take_seconds.append(time.perf_counter() - start)
        return tensor

    def ping_pong(self, tensor: torch.Tensor, *, taken: bool) -> float:
        """Microseconds of one way."""

        def one_round() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            if self.rank == 0:
                self.put(tensor)
            self.arrive()
            if taken:
                self.take()
                torch.cuda.synchronize()
            if self.rank == 1:
                self.put(tensor)
            seconds = (time.perf_counter() - start) / 2
            if not taken:
                self.take()
            return seconds

        found = micros(one_round, tensor.nbytes)
        self.transport.flush(20)
        return found


def nccl_ping_pong(tensor: torch.Tensor, rank: int) -> float:
    other = torch.empty_like(tensor)

    def one_round() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for turn in (0, 1):
            if rank == turn:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(other, 1 - rank)
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 2

    return micros(one_round, tensor.nbytes)


def copy_time(target: torch.Tensor, source: torch.Tensor) -> float:
    def one_round() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start

    return micros(one_round, source.nbytes)


def floors(rank: int, sizes: list[int]) -> Table:
    """Plain copies from GPU 0 while GPU 1's process waits."""
    found: Table = {"peer copy": [], "D2H": [], "H2D": []}
    if rank == 0:
        pinned = torch.empty(sizes[-1], dtype=torch.uint8, pin_memory=True)
        remote = torch.empty(sizes[-1], dtype=torch.uint8, device="cuda:1")
        for size in sizes:
            source = random_bytes(size)
            found["peer copy"].append(copy_time(remote[:size], source))
            found["D2H"].append(copy_time(pinned[:size], source))
            found["H2D"].append(copy_time(source, pinned[:size]))
    dist.barrier()
    return found


def gemm_loop(beside: Callable[[], None]) -> float:
    """Microseconds per GEMM with ``beside()`` called once per GEMM on another stream."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream()
    out = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(GEMMS + GEMM_WARM_UP):
        if i == GEMM_WARM_UP:
            torch.cuda.synchronize()
            dist.barrier()
            begin.record()
        torch.mm(a, b, out=out)
        with torch.cuda.stream(side):
            beside()
        if i % 4 == 3:
            side.synchronize()  # the host stays a few GEMMs ahead and no more
    end.record()
    torch.cuda.synchronize()
    dist.barrier()
    return begin.elapsed_time(end) * 1e3 / GEMMS


def beside_ours(kind: str, rank: int, payload: torch.Tensor) -> float:
    """Microseconds per GEMM beside one message each way per GEMM."""
    ours, arrived = Ours(kind, rank, BESIDE_BYTES), 0

    def take_all() -> None:
        nonlocal arrived
        while arrived < ours.transport.poll()[0]:
            ours.take()
            arrived += 1

    def exchange() -> None:
        ours.put(payload)
        take_all()

    found = gemm_loop(exchange)
    deadline = time.monotonic() + 20
    while arrived < GEMMS + GEMM_WARM_UP and time.monotonic() < deadline:
        ours.transport.wait(0.1)
        take_all()
    assert arrived == GEMMS + GEMM_WARM_UP, arrived
    ours.transport.flush(20)
    dist.barrier()
    ours.transport.close()
    return found


def gemm_rows(rank: int) -> dict[str, float]:
    payload = random_bytes(BESIDE_BYTES)
    other = torch.empty_like(payload)

    def nccl() -> None:
        operations = [
            dist.P2POp(dist.isend, payload, 1 - rank),
            dist.P2POp(dist.irecv, other, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    rows = {"alone": gemm_loop(lambda: None)}
    rows |= {kind: beside_ours(kind, rank, payload) for kind in KINDS}
    rows["nccl"] = gemm_loop(nccl)
    rows["alone again"] = gemm_loop(lambda: None)
    return rows


def measure(rank: int, quick: bool, meeting: str) -> dict[str, Any]:
    """All numbers, as the JSON file has them."""
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    sizes = SIZES[:-1] if quick else SIZES
    table = floors(rank, sizes)
    table["nccl"] = [nccl_ping_pong(random_bytes(size), rank) for size in sizes]
    costs = {}
    for kind in KINDS:
        ours = Ours(kind, rank, sizes[-1])
        for mode in ("arrive", "taken"):
            table[f"{kind} {mode}"] = [
                ours.ping_pong(random_bytes(size), taken=mode == "taken") for size in sizes
            ]
        calls = (ours.put_seconds, ours.take_seconds)
        costs[kind] = [statistics.median(seconds[WARM_UP:]) * 1e6 for seconds in calls]
        dist.barrier()
        ours.transport.close()
    gemm = gemm_rows(rank)
    dist.destroy_process_group()
    return {"sizes": sizes, "one_way_us": table, "host_us": costs, "gemm_us": gemm}


def report(facts: dict[str, Any]) -> None:
    print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'unset')}\n")
    sizes = " | ".join(f"{size // 1024} KiB" for size in facts["sizes"])
    rows = [(name, *(f"{v:.1f}" for v in row)) for name, row in facts["one_way_us"].items()]
    harness.print_table(f"one way, us | {sizes}", rows)
    print()
    costs = [(kind, f"{put:.1f}", f"{take:.1f}") for kind, (put, take) in facts["host_us"].items()]
    harness.print_table("host time, us | put | take", costs)
    print()
    gemm = facts["gemm_us"]
    shares = [(name, f"{v:.1f}", f"{v / gemm['alone'] - 1:+.2%}") for name, v in gemm.items()]
    harness.print_table(f"GEMM {GEMM}^3 beside | us | longer by", shares)


def main() -> int:
    parser = harness.new_parser(
        __doc__,
        quick=(False, "up to 64 MiB only"),
        out=("", "file for all numbers, as JSON"),
    )
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("needs 2 CUDA devices")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        most = DEADLINE + 30
        facts = harness.run_members(measure, 2, arguments.quick, meeting, timeout=most)[0]
    report(facts)
    harness.write_json(arguments.out, facts)
    return 0


if __name__ == "__main__":
    exit_with(main)
