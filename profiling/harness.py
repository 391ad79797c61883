"""Shared by the benchmarks: options, worker processes, turns, statistics, tables, JSON.

Importing it makes the package beside this folder importable. A benchmark measures its arms in
turns, after an untimed pass of each, so that all arms meet the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
import os
import queue
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.dpp.processes import bound_to_this, end_with_parent  # noqa: E402

Arm = TypeVar("Arm")
Sample = TypeVar("Sample")


class Stop:
    """Notes the first SIGTERM or SIGINT of its block in :attr:`reason`. None of them ends the
    program there, so that it can report what it has measured.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.reason = self.reason or f"stopped by {signal.Signals(number).name}"


def new_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser described by a script's first line.

    Args:
        doc: the script's docstring.
        options: name to default, or to (default, help); the default gives the type.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").split("\n\n")[0],
        formatter_class=functools.partial(
            argparse.ArgumentDefaultsHelpFormatter, max_help_position=30
        ),
    )
    for name, value in options.items():
        default, text = value if isinstance(value, tuple) else (value, None)
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            metavar = {int: "N", float: "X", str: "TEXT"}[type(default)]
            kind = type(default)
            text = text or "default: %(default)s"
            parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)
    return parser


def take_turns(arms: Mapping[Arm, Callable[[], Sample]], rounds: int) -> dict[Arm, list[Sample]]:
    """Samples of every arm. In each round each arm runs once untimed, then once."""
    samples: dict[Arm, list[Sample]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            arm()
            samples[name].append(arm())
    return samples


def sample(
    one_round: Callable[[], float | None],
    *,
    seconds: float = 0.0,
    least: int = 5,
    most: int = 2000,
    warm_up: int = 3,
) -> list[float]:
    """Durations of rounds until ``seconds`` are spent, after ``warm_up`` rounds that do not count.

    A round that returns a number gives its own duration.
    """
    for _ in range(warm_up):
        one_round()
    found: list[float] = []
    while (sum(found) < seconds and len(found) < most) or len(found) < least:
        start = time.perf_counter()
        own = one_round()
        found.append(time.perf_counter() - start if own is None else own)
    return found


def quantile(values: Iterable[float], share: float) -> float:
    """The value that a share of all values lies below."""
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)]


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def print_table(headings: str, rows: Iterable[Iterable[object]]) -> None:
    """A Markdown table; ``headings`` are separated by `` | ``."""
    columns = headings.split(" | ")
    print(f"| {headings} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def write_json(path: str | os.PathLike[str] | None, facts: object) -> None:
    """Write a benchmark's results, if a path is given; what JSON has no type for becomes text."""
    if path:
        Path(path).write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")


def free_port() -> int:
    """A TCP port of this host that nobody listens on. It is below those that the system gives to
    connections: ranks that start for half a minute found such a one taken.
    """
    while True:
        port = 12000 + secrets.randbelow(18000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def start_ranks(num_ranks: int, *flags: str, **variables: str) -> int:
    """Start this script once per rank, with further flags and environment variables.

    Returns:
        The exit status; the first failure ends all ranks.
    """
    port = os.environ.get("MASTER_PORT") or str(free_port())
    job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, *flags],
            env={**os.environ, **variables, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=bound_to_this(signal.SIGKILL),
        )
        for rank in range(num_ranks)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return 1
            time.sleep(0.1)
        return max(abs(process.returncode) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def over_ranks(*values: float) -> list[float]:
    """The largest of each value over all ranks of the job."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def run_members(
    target: Callable[..., Any], num: int, *arguments: Any, method: str = "spawn", timeout: float
) -> list[Any]:
    """Results of ``target(rank, *arguments)`` in ``num`` processes, by rank.

    A process that dies, or ``timeout`` seconds, end the program.
    """
    context = multiprocessing.get_context(method)
    results: Any = context.Queue()
    members = [
        context.Process(target=_member, args=(target, rank, arguments, results), daemon=True)
        for rank in range(num)
    ]
    for member in members:
        member.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while len(found) < num:
            try:
                rank, result = results.get(timeout=0.5)
                found[rank] = result
            except queue.Empty:
                if any(member.exitcode for member in members):
                    raise SystemExit("a process of the benchmark failed") from None
                if time.monotonic() > end:
                    raise SystemExit(f"no result within {timeout:g} s") from None
    finally:
        for member in members:
            member.join(10 if len(found) == num else 0)
            member.kill()
    return [found[rank] for rank in range(num)]


def _member(target: Callable[..., Any], rank: int, arguments: Any, results: Any) -> None:
    end_with_parent()
    results.put((rank, target(rank, *arguments)))


def meet(store: Any, rank: int, num: int, where: str) -> None:
    """Wait until all ``num`` ranks are here; ``where`` names the place, once."""
    store.set(f"{where} {rank}", "1")
    store.wait([f"{where} {other}" for other in range(num)])


def leave(store: Any, rank: int, num: int) -> None:
    """The last call of each rank. Rank 0, whose store it is, returns when no other asks it more."""
    if rank:
        store.set(f"left {rank}", "1")
    else:
        store.wait([f"left {other}" for other in range(1, num)])


def open_trace(num_ranks: int, num_chunks: int, folder: Path) -> Any:
    """A recorder of this rank's trace."""
    import torch.distributed as dist

    from megatron.dpp.trace import TraceLayout, open_recorder

    rank = dist.get_rank()
    layout = TraceLayout(
        data=0, pipeline=rank, tensor=0, data_size=1,
        pipeline_size=num_ranks, tensor_size=1, num_chunks=num_chunks,
    )  # fmt: skip
    return open_recorder(folder, rank=rank, layout=layout, device="cpu")
