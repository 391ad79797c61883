"""GPU transports side by side in one run: ours, NCCL's send and receive, and the plain copies.

Two processes, one GPU each. One way = half a ping-pong, medians, microseconds, random bytes:

- ``arrive``: put() until the receiver's poll() shows it; beside ``peer copy`` (and synchronise).
- ``taken``: until take()'s tensor is there (synchronised); beside NCCL's receive (synchronised).

A GEMM loop beside 16 MiB per GEMM in both directions shows what compute pays. Exits 1 when a gate
fails.

    python profiling/bench_cuda_transport.py [--out FILE] [--quick] [--kinds cuda_ipc staged]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions, open_transport

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
WARM_UP = 10
GEMM = 8192
GEMMS = 150
BESIDE_BYTES = 16 << 20


def repeats(size: int) -> int:
    return 150 if size <= 1 << 20 else 60 if size <= 64 << 20 else 25


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def micros(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP:]) * 1e6


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

    def ping_pong(self, tensor: torch.Tensor, taken: bool) -> float:
        seconds = []
        for _ in range(repeats(tensor.nbytes) + WARM_UP):
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
            seconds.append((time.perf_counter() - start) / 2)
            if not taken:
                self.take()
        self.transport.flush(20)
        return micros(seconds)


def nccl_ping_pong(tensor: torch.Tensor, rank: int) -> float:
    other = torch.empty_like(tensor)
    seconds = []
    for _ in range(repeats(tensor.nbytes) + WARM_UP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for turn in (0, 1):
            if rank == turn:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(other, 1 - rank)
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / 2)
    return micros(seconds)


def copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds = []
    for _ in range(repeats(source.nbytes) + WARM_UP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - start)
    return micros(seconds)


def floors(rank: int, sizes: list[int]) -> dict[str, list[float]]:
    """Plain copies from GPU 0 while GPU 1's process waits."""
    found: dict[str, list[float]] = {"peer copy": [], "D2H": [], "H2D": []}
    if rank == 0:
        pinned = torch.empty(sizes[-1], dtype=torch.uint8, pin_memory=True)
        remote = torch.empty(sizes[-1], dtype=torch.uint8, device="cuda:1")
        for size in sizes:
            source = random_bytes(size)
            found["peer copy"].append(copy_seconds(remote[:size], source))
            found["D2H"].append(copy_seconds(pinned[:size], source))
            found["H2D"].append(copy_seconds(source, pinned[:size]))
    dist.barrier()
    return found


def gemm_loop(beside) -> float:
    """Microseconds per GEMM with ``beside(stream)`` called once per GEMM on another stream."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream()
    out = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(GEMMS + 20):
        if i == 20:
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


def gemm_rows(rank: int, kinds: list[str]) -> dict[str, float]:
    payload = random_bytes(BESIDE_BYTES)
    other = torch.empty_like(payload)
    rows = {"alone": gemm_loop(lambda: None)}

    def nccl() -> None:
        operations = [
            dist.P2POp(dist.isend, payload, 1 - rank),
            dist.P2POp(dist.irecv, other, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    for kind in kinds:
        ours = Ours(kind, rank, BESIDE_BYTES)
        arrived = 0

        def exchange(ours: Ours = ours) -> None:
            nonlocal arrived
            ours.put(payload)
            while arrived < ours.transport.poll()[0]:
                ours.take()
                arrived += 1

        rows[kind] = gemm_loop(exchange)
        deadline = time.monotonic() + 20
        while arrived < GEMMS + 20 and time.monotonic() < deadline:
            if ours.transport.poll()[0] > arrived:
                ours.take()
                arrived += 1
            else:
                ours.transport.wait(1.0)
        assert arrived == GEMMS + 20, arrived
        ours.transport.flush(20)
        dist.barrier()
        ours.transport.close()
    rows["nccl"] = gemm_loop(nccl)
    rows["alone again"] = gemm_loop(lambda: None)
    return rows


def measure(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    sizes = SIZES[:-1] if arguments.quick else SIZES
    table = floors(rank, sizes)
    table["nccl"] = [nccl_ping_pong(random_bytes(size), rank) for size in sizes]
    costs = {}
    for kind in arguments.kinds:
        ours = Ours(kind, rank, sizes[-1])
        for mode in ("arrive", "taken"):
            table[f"{kind} {mode}"] = [
                ours.ping_pong(random_bytes(size), mode == "taken") for size in sizes
            ]
        costs[kind] = [micros(ours.put_seconds), micros(ours.take_seconds)]
        dist.barrier()
        ours.transport.close()
    gemm = gemm_rows(rank, arguments.kinds)
    if rank == 0:
        print_table(sizes, table, costs, gemm)
        if arguments.out:
            facts = {"sizes": sizes, "one_way_us": table, "host_us": costs, "gemm_us": gemm}
            Path(arguments.out).write_text(json.dumps(facts, indent=1))
        failed = failed_gates(sizes, table, gemm, arguments.kinds)
        print("\n".join(failed) or "every gate holds", flush=True)
        Path(meeting + ".failed").write_text(str(len(failed)))
    dist.destroy_process_group()


def failed_gates(sizes, table, gemm, kinds) -> list[str]:
    failed = []
    for i, size in enumerate(sizes):
        copy = table["peer copy"][i]
        if "cuda_ipc" in kinds:
            arrive, taken = (table[f"cuda_ipc {mode}"][i] for mode in ("arrive", "taken"))
            if size >= 64 << 10 and taken > table["nccl"][i]:
                failed.append(f"GATE {size}: cuda_ipc {taken:.0f} us, NCCL {table['nccl'][i]:.0f}")
            if arrive > max(1.05 * copy, copy + 5):
                failed.append(
                    f"GATE {size}: cuda_ipc arrives in {arrive:.0f} us, peer copy {copy:.0f}"
                )
        slowest = max(table["D2H"][i], table["H2D"][i])
        if "staged" in kinds and size >= 16 << 20 and table["staged arrive"][i] * 0.85 > slowest:
            failed.append(
                f"GATE {size}: staged {table['staged arrive'][i]:.0f} us, copy {slowest:.0f}"
            )
    alone = (gemm["alone"] + gemm["alone again"]) / 2
    if "cuda_ipc" in kinds and gemm["cuda_ipc"] > 1.01 * alone:
        failed.append(f"GATE GEMM: {gemm['cuda_ipc']:.1f} us beside cuda_ipc, {alone:.1f} alone")
    return failed


def print_table(sizes, table, costs, gemm) -> None:
    print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'unset')}")
    print(f"{'one way, us':24}" + "".join(f"{size // 1024:>9}K" for size in sizes))
    for name, row in table.items():
        print(f"{name:24}" + "".join(f"{value:10.1f}" for value in row))
    for name, (put, take) in costs.items():
        print(f"host time of {name}: put {put:.1f} us, take {take:.1f} us")
    for name, value in gemm.items():
        print(f"GEMM {GEMM}^3 beside {name:12} {value:8.1f} us  {value / gemm['alone'] - 1:+.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", help="file for all numbers, as JSON")
    parser.add_argument("--quick", action="store_true", help="up to 64 MiB only")
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds, then stacks are printed"
    )
    parser.add_argument("--kinds", nargs="*", default=["cuda_ipc", "staged"])
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("needs 2 CUDA devices")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        torch.multiprocessing.spawn(measure, (arguments, meeting), 2)
        return int(Path(meeting + ".failed").read_text() != "0")


if __name__ == "__main__":
    sys.exit(main())
