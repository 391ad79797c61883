"""Measures the transport's kinds side by side in one run, and holds them to their gates.

    python profiling/bench_transport.py [--sizes 4K 64K 1M 16M] [--contended] [--json FILE]

Two processes play ping-pong; the figure is the median one-way time from Python (put to taken). A
plain copy between two buffers is the floor. gloo's own send/recv is measured beside our kinds, and
UCX where ``ucx_perftest`` is installed. Gates are ratios within this run, so they mean the same on
a slow machine; the exit status is 1 when one is missed, and the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions, open_transport

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SECONDS_PER_POINT = 1.0
MOST_ROUNDS = 2000


@dataclass(frozen=True)
class Gate:
    """``subject`` must be at least ``factor`` times as fast as ``baseline`` at a size."""

    subject: str
    baseline: str
    factor: float
    least_bytes: int
    most_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.subject} at least {self.factor:g} x as fast as {self.baseline} from "
            f"{_human(self.least_bytes)} to {_human(self.most_bytes)}"
        )


GATES = (
    Gate("shm", "gloo", 10.0, 64 << 10, 64 << 10),
    Gate("shm", "gloo", 4.0, 1 << 20, 16 << 20),
    Gate("shm", "copy", 1 / 1.1, 16 << 20, 1 << 30),
    Gate("tcp", "gloo", 1.0, 1, 1 << 30),
    Gate("tcp", "gloo", 1.5, 1, 1 << 20),
)
CONTENDED_GATES = (Gate("shm", "gloo", 3.0, 16 << 20, 16 << 20),)


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


def time_rounds(one_round: Callable[[], None], halves: int) -> float:
    """Median seconds of one way; a round is ``halves`` ways."""
    for _ in range(3):
        one_round()
    samples: list[float] = []
    while (sum(samples) < SECONDS_PER_POINT and len(samples) < MOST_ROUNDS) or len(samples) < 5:
        start = time.perf_counter()
        one_round()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) / halves


def measure_copy(num_bytes: int) -> float:
    """Seconds of one copy into memory that exists."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)

    def one_round() -> None:
        target.copy_(source)

    return time_rounds(one_round, 1)


class OurKind:
    """Ping-pong over one of the transport's kinds. A tensor of one element ends the game."""

    def __init__(self, kind: str, rank: int, num_bytes: int, path: str) -> None:
        channels = [
            ChannelSpec(0, 1, 0, Direction.FORWARD, num_bytes),
            ChannelSpec(1, 0, 0, Direction.BACKWARD, num_bytes),
        ]
        store = dist.FileStore(path)
        options = TransportOptions(setup_timeout=30, node_ips="127.0.0.1")
        self.transport = open_transport(
            channels, rank=rank, store=store, kind=kind, options=options
        )
        self.taken = 0

    def send(self, tensor: torch.Tensor) -> None:
        self.transport.put(0, tensor, iteration=0, microbatch=0)

    def receive(self) -> torch.Tensor:
        while self.transport.poll()[0] == self.taken:
            self.transport.wait(10.0)
        self.taken += 1
        return self.transport.take(0).tensor

    def close(self) -> None:
        self.transport.flush(10.0)
        self.transport.close()


class Gloo:
    """Ping-pong over torch.distributed's own gloo send and receive."""

    def __init__(self, kind: str, rank: int, num_bytes: int, path: str) -> None:
        store = dist.FileStore(path, 2)
        self.group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        self.peer = 1 - rank
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor) -> None:
        if tensor.numel() != self.buffer.numel():  # gloo has no sizes of its own
            tensor = torch.full_like(self.buffer, 255)
        self.group.send([tensor], self.peer, 0).wait()

    def receive(self) -> torch.Tensor:
        self.group.recv([self.buffer], self.peer, 0).wait()
        return self.buffer[:1] if self.buffer[0] == 255 else self.buffer

    def close(self) -> None:
        pass


def _play(player: Any, rank: int, num_bytes: int) -> float | None:
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    if rank == 0:

        def one_round() -> None:
            player.send(tensor)
            player.receive()

        seconds = time_rounds(one_round, 2)
        player.send(torch.ones(1, dtype=torch.uint8))
        return seconds
    while player.receive().numel() != 1:
        player.send(tensor)
    return None


def _player_process(kind: str, rank: int, num_bytes: int, path: str, results: Any) -> None:
    torch.set_num_threads(1)
    player = (Gloo if kind == "gloo" else OurKind)(kind, rank, num_bytes, path)
    seconds = _play(player, rank, num_bytes)
    player.close()
    if rank == 0:
        results.put(seconds)


def measure_pair(kind: str, num_bytes: int) -> float:
    """Median one-way seconds between two processes."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_bytes, f"{folder}/store", results)
        processes = [
            context.Process(target=_player_process, args=(kind, rank, *arguments), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        try:
            seconds: float = results.get(timeout=120)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return seconds


def measure_ucx(num_bytes: int) -> float | None:
    """Seconds of one way in ``ucx_perftest``'s tag latency, or None where it is not installed."""
    if shutil.which("ucx_perftest") is None:
        return None
    command = ["ucx_perftest", "-t", "tag_lat", "-s", str(num_bytes), "-n", "500", "-f"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        client = subprocess.run(
            [*command, "127.0.0.1"], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        server.kill()
        server.wait()
    return float(client.stdout.split()[2]) * 1e-6


def _hog() -> None:
    while True:
        sum(range(10000))


def measure_all(sizes: Sequence[int], kinds: Sequence[str]) -> dict[str, dict[int, float]]:
    """Seconds by kind and size; the kinds of one size are measured right after one another."""
    table: dict[str, dict[int, float]] = {name: {} for name in ("copy", "gloo", *kinds, "ucx")}
    for size in sizes:
        table["copy"][size] = measure_copy(size)
        for kind in ("gloo", *kinds):
            table[kind][size] = measure_pair(kind, size)
        ucx = measure_ucx(size)
        if ucx is not None:
            table["ucx"][size] = ucx
    return {name: row for name, row in table.items() if row}


def missed_gates(table: dict[str, dict[int, float]], gates: Sequence[Gate]) -> list[str]:
    """What was not reached, each with its figures."""
    missed = []
    for gate in gates:
        subject, baseline = table.get(gate.subject, {}), table.get(gate.baseline, {})
        for size in sorted(set(subject) & set(baseline)):
            if gate.least_bytes <= size <= gate.most_bytes:
                factor = baseline[size] / subject[size]
                if factor < gate.factor:
                    missed.append(f"{gate}: {factor:.2f} x at {_human(size)}")
    return missed


def print_table(title: str, table: dict[str, dict[int, float]]) -> None:
    """One way in microseconds, and as a multiple of the plain copy."""
    sizes = list(table["copy"])
    print(f"\n{title}\n\n| one way, us (x copy) | " + " | ".join(map(_human, sizes)) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for name, row in table.items():
        cells = (
            f"{row[size] * 1e6:.1f} ({row[size] / table['copy'][size]:.2f})" if size in row else ""
            for size in sizes
        )
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_sizes = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20]
    parser.add_argument("--sizes", nargs="+", type=_parse_size, default=default_sizes)
    parser.add_argument("--kinds", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--contended", action="store_true", help="also with two compute hogs")
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, PyTorch {torch.__version__}")
    tables = {"quiet": measure_all(arguments.sizes, arguments.kinds)}
    print_table("Quiet", tables["quiet"])
    missed = missed_gates(tables["quiet"], GATES)
    if arguments.contended:
        hogs = [multiprocessing.get_context("fork").Process(target=_hog) for _ in range(2)]
        for hog in hogs:
            hog.start()
        try:
            tables["contended"] = measure_all(arguments.sizes, arguments.kinds)
        finally:
            for hog in hogs:
                hog.kill()
        print_table("With two compute hogs", tables["contended"])
        contended = missed_gates(tables["contended"], CONTENDED_GATES)
        missed += [f"contended: {text}" for text in contended]
    if arguments.json:
        arguments.json.write_text(json.dumps(tables))
    print(
        "\n" + ("\n".join(f"MISSED {text}" for text in missed) if missed else "all gates reached")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
