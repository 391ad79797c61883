"""The soak of ``tools/soak.sh``: a run that is disturbed at random moments, again and again.

A lap is one training run of :data:`ITERATIONS`, which job after job goes on with. The two ranks of
a job are on one host, under torchrun, or on two hosts, as programs in network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import psutil
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.netns import Hosts, two_hosts
from tests.nodes import MARK, REPOSITORY, Node, end, left_behind, stacks
from tests.runtime.launcher import free_port
from tests.small_disk import mounted

ITERATIONS, SAVE_EVERY = 400, 50
DISK_BYTES = 24 << 20
DEADLINE = 150.0
"""Seconds until a job has ended: a minute for collectives, 15 s for messages, on a busy machine."""
STEADY = 100
"""Iterations of a process after which nothing of it grows."""
BOUNDS = {"memory (MiB)": 24.0, "descriptors": 4.0, "threads": 2.0}
"""Growth of a rank from there on, from the median of its first samples to that of its last."""
SAMPLES = 10
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    f"--lr-decay-style constant --train-iters {ITERATIONS} --eval-iters 0 --split 1,0,0 "
    "--transformer-impl local --distributed-backend gloo --no-persist-layer-norm --num-workers 1 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --log-interval 50 "
    "--pipeline-model-parallel-size 2 --use-dpp --dpp-timeout 15 --distributed-timeout-minutes 1 "
    "--rows as-they-are --calculate-per-token-loss --hidden-dropout 0.1 "
    f"--tokenizer-type NullTokenizer --vocab-size 100 --save-interval {SAVE_EVERY} "
    f"--save-retain-interval {100 * ITERATIONS}"
)
HARMLESS = ("CONT", "WINCH", "URG", "CHLD")
_IN_THE_START = 0.2
"""Share of the jobs whose first disturbance may come before their first iteration."""
SIGNALS = ("KILL", "KILL", "TERM", "INT", "HUP", "QUIT", "SEGV", "BUS", "ABRT", "USR1")


@dataclasses.dataclass
class Disturbance:
    """Something done to a job; ``lethal`` is None where the job may end or go on."""

    kind: str
    victim: str
    iteration: int
    culprit: tuple[str, ...] = ()
    lethal: bool | None = True
    seconds: float = 0.0
    said: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)


class Job:
    """Two ranks of one run, and all that they start."""

    def __init__(self, folder: Path, hosts: Hosts | None, save: Path | None) -> None:
        self.metrics, self.temporary = folder / "metrics.jsonl", folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.first = self.iteration()
        self._on_two_hosts = hosts is not None
        words = [str(REPOSITORY / "pretrain_gpt.py"), *FLAGS.split()]
        words += ["--data-path", str(folder / "tokens"), "--metrics-file", str(self.metrics)]
        words += ["--data-cache-path", str(folder / "cache")]
        if save is not None:
            words += ["--save", str(save), "--load", str(save)]
        shared = {
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", MARK: str(os.getpid()),
            "TMPDIR": str(self.temporary), "PYTHONFAULTHANDLER": "", "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1", "DPP_PEER_TIMEOUT": "5",
        }  # fmt: skip
        if hosts is None:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            command = [sys.executable, *torchrun, "--nproc_per_node", "2", *words]
            self.nodes = [Node(command, folder / "job.log", **shared)]
            return
        words += ["--node-ips", ",".join(hosts.addresses)]
        place = {
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        self.nodes = [
            Node(
                hosts.command(rank, sys.executable, *words),
                folder / f"rank{rank}.log",
                **shared, **place, RANK=str(rank), GLOO_SOCKET_IFNAME=hosts.devices[rank],
            )
            for rank in range(2)
        ]  # fmt: skip

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The processes that run now: ``torchrun``, ``rank N``, ``child of rank N``."""
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for number, node in enumerate(self.nodes):
            tree = node.tree()
            roots = {f"rank {number}": tree[:1]}
            if not self._on_two_hosts:
                found["torchrun"] += tree[:1]
                roots = defaultdict(list)
                for process in tree[:1] and tree[0].children():
                    roots[f"rank {_rank_of(process)}"].append(process)
            for name, ranks in roots.items():
                found[name] += ranks
                for rank in ranks:
                    with contextlib.suppress(psutil.Error):
                        found[f"child of {name}"] += rank.children(recursive=True)
        return {name: processes for name, processes in found.items() if processes}

    def has_ended(self) -> bool:
        return all(node.process.poll() is not None for node in self.nodes)

    def has_ended_in_part(self) -> bool:
        """True if, on two hosts, only one rank is left."""
        return any(node.process.poll() is not None for node in self.nodes)

    def is_complete(self) -> bool:
        return all(node.process.poll() == 0 for node in self.nodes)

    def seen_by_starters(self) -> list[str]:
        """The end of a killed rank when the other one has ended well, and nobody of the job is left
        to name it. On one host torchrun says so itself."""
        codes = [node.process.poll() for node in self.nodes]
        return [
            f"rank {rank} ended by signal {-code}"
            for rank, code in enumerate(codes)
            if self._on_two_hosts and code is not None and code < 0 and 0 in codes
        ]

    def iteration(self) -> int:
        """The last one whose numbers are written."""
        return max((row["iteration"] for row in losses_in(self.metrics)), default=0)

    def said(self) -> str:
        return "\n".join(node.said() for node in self.nodes)


def _rank_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK", "?")
    return "?"


def losses_in(metrics: Path) -> list[dict[str, Any]]:
    """The rows of iterations that can be read: a killed run leaves half of one."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in metrics.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if "loss" in row]


class Growth:
    """Samples of the ranks' memory, descriptors and threads, of ranks that make steps: one that
    ends or waits gives back what it had, which would hide a growth."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._last = 0

    def look(self, job: Job) -> None:
        before, self._last = self._last, job.iteration()
        if self._last < job.first + STEADY or self._last == before:
            return
        found = job.processes()
        for process in [*found.get("rank 0", []), *found.get("rank 1", [])]:
            with contextlib.suppress(psutil.Error):
                now = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
                self._samples[process.pid].append(now)

    def most(self) -> dict[str, float]:
        """The largest growth of any rank that was looked at often enough."""
        long = [s for s in self._samples.values() if len(s) >= 3 * SAMPLES]
        return {
            name: max(
                (median(s[i] for s in each[-SAMPLES:]) - median(s[i] for s in each[:SAMPLES])
                 for each in long),
                default=0.0,
            )
            for i, name in enumerate(BOUNDS)
        }  # fmt: skip

    def ranks(self) -> int:
        return sum(len(each) >= 3 * SAMPLES for each in self._samples.values())


class Soak:
    """Laps until the time is over."""

    def __init__(self, folder: Path, hosts: Hosts | None, disk: Path | None, seed: int) -> None:
        self._folder, self._hosts, self._disk = folder, hosts, disk
        self._random = random.Random(seed)
        self._save = (disk or folder) / "checkpoints"
        self._before = set(os.listdir("/dev/shm"))
        self.done: list[Disturbance] = []
        self.growth = Growth()
        self.laps = self.compared = self.unequal = 0
        self._expected: dict[int, set[float]] = {}
        self._of_killed: set[str] = set()

    def run(self, seconds: float) -> None:
        write_tokens(self._folder / "tokens")
        job = Job(self._folder, None, None)
        try:
            self._wait(job, lambda: False, 1200)
        finally:
            end(*job.nodes)
        assert job.is_complete(), job.said()
        self._expected = self._losses()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._lap(until)

    def _lap(self, until: float) -> None:
        (self._folder / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(self._save, ignore_errors=True)
        complete = False
        while not complete and time.monotonic() < until:
            if max(self._losses(), default=0) == ITERATIONS:
                complete = True  # it was ended between its last iteration and its end
                break
            hosts = self._random.choice([None, self._hosts])
            job = Job(self._folder, hosts, self._save)
            try:
                complete = self._disturb_until_it_ends(job, hosts)
            finally:
                end(*job.nodes)
        self.laps += complete
        found = self._losses()
        self.compared += sum(map(len, found.values()))
        for iteration, values in found.items():
            if values != self._expected[iteration]:
                self.unequal += 1
                print(f"iteration {iteration}: {values}, expected {self._expected[iteration]}")

    def _losses(self) -> dict[int, set[float]]:
        found: dict[int, set[float]] = defaultdict(set)
        for row in losses_in(self._folder / "metrics.jsonl"):
            found[row["iteration"]].add(row["loss"])
        return found

    def _disturb_until_it_ends(self, job: Job, hosts: Hosts | None) -> bool:
        """True where the run came to its last iteration."""
        if self._random.random() < _IN_THE_START:
            self._wait(job, lambda: False, self._random.uniform(0.0, 20.0))
        else:
            self._wait(job, lambda: job.iteration() > job.first, 2 * DEADLINE)
        while True:
            self._wait(job, lambda: False, self._random.uniform(0.0, 4.0))
            if job.has_ended():
                if not job.is_complete():
                    self._note(Disturbance("none", "", 0, faults=[job.said()[-3000:]]))
                return job.is_complete()
            disturbance = self._disturb(job, hosts)
            if disturbance is None:
                continue
            self._judge(job, disturbance)
            self._note(disturbance)
            if job.has_ended():
                return job.is_complete()

    def _disturb(self, job: Job, hosts: Hosts | None) -> Disturbance | None:
        kinds = {"signal": 8, "stop": 2, "pause": 6, "harmless": 4}
        if hosts is not None:
            kinds |= {"cut": 1, "blackout": 6}
        if self._disk is not None and job.iteration() > job.first:
            kinds["full disk"] = 2
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        now, victims = job.iteration(), job.processes()
        if kind in ("cut", "blackout"):
            return self._cut(hosts, kind, now)
        if kind == "full disk":
            return self._fill(job, now)
        if not victims:
            return None
        name = self._random.choice(sorted(victims))
        victim = self._random.choice(victims[name])
        try:
            return self._signal(job, kind, name, victim)
        except psutil.NoSuchProcess:
            return None  # it ended by itself

    def _signal(self, job: Job, kind: str, name: str, victim: psutil.Process) -> Disturbance | None:
        made = Disturbance(kind, name, job.iteration(), _names_of(name, victim))
        if kind == "pause":
            victim.suspend()
            time.sleep(self._random.uniform(0.5, 4.0))
            victim.resume()
            made.kind, made.lethal = "SIGSTOP, SIGCONT", False
        elif kind == "harmless":
            made.kind, made.lethal = f"SIG{self._random.choice(HARMLESS)}", False
            victim.send_signal(getattr(signal, made.kind))
        elif kind == "stop":
            victim.suspend()
            made.kind, made.lethal = "SIGSTOP", True if name.startswith("rank") else None
            if name == "torchrun":
                made.culprit = ()  # nobody waits for it
                made.seconds = self._wait(job, lambda: False, 20.0)
            else:
                ended = job.has_ended if name.startswith("child") else job.has_ended_in_part
                made.seconds = self._wait(job, ended, DEADLINE)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()
        else:
            made.kind = f"SIG{self._random.choice(SIGNALS)}"
            victim.send_signal(getattr(signal, made.kind))
            made.lethal = None if name.startswith("child") else True
            if name == "torchrun":
                made.culprit = ()  # it says itself that it ends, unless it is killed
        return made

    def _cut(self, hosts: Hosts | None, kind: str, now: int) -> Disturbance:
        assert hosts is not None
        hosts.cut()
        time.sleep(self._random.uniform(0.5, 3.0) if kind == "blackout" else 20.0)
        hosts.restore()
        lethal = False if kind == "blackout" else None
        return Disturbance(kind, "wire", now, ("rank 0 (pid", "rank 1 (pid", "10.213."), lethal)

    def _fill(self, job: Job, now: int) -> Disturbance:
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        seconds = self._wait(job, job.has_ended, DEADLINE)
        filler.unlink()
        culprit = ("no space left", "No space left")
        return Disturbance("full disk", "disk", now, culprit, None, seconds)

    def _judge(self, job: Job, disturbance: Disturbance) -> None:
        """Wait for what has to come of it, and look at what it left."""
        before = job.iteration()
        if disturbance.lethal is False:
            disturbance.seconds += self._wait(job, lambda: job.iteration() > before, DEADLINE)
            if not job.is_complete() and (job.has_ended() or job.iteration() <= before):
                disturbance.faults.append("it did not go on")
        else:
            goes_on = (lambda: job.iteration() > before + SAVE_EVERY) if (
                disturbance.lethal is None) else (lambda: False)  # fmt: skip
            disturbance.seconds += self._wait(job, goes_on, DEADLINE)
        if not job.has_ended():
            if disturbance.lethal is not False and job.iteration() <= before:
                disturbance.faults.append(f"not ended: {stacks(*job.nodes)[-6000:]}")
            return
        said = job.said()
        if job.is_complete():
            return
        errors = [line for line in said.splitlines() if "error" in line or "ended by" in line]
        errors += job.seen_by_starters()
        named = [line for line in errors if any(each in line for each in disturbance.culprit)]
        disturbance.said = (named or [""])[-1][:300]
        if disturbance.culprit and not named:
            disturbance.faults.append(f"nobody named it: {said[-3000:]}")
        if disturbance.victim == "torchrun":  # a killed one leaves its folders
            self._of_killed |= {path.name for path in job.temporary.glob("torchelastic_*")}
        left = left_behind(self._before, job.temporary, self._of_killed)
        self._before |= {name.removeprefix("/dev/shm/") for name in left}
        disturbance.faults += [f"left: {each}" for each in left]

    def _wait(self, job: Job, done: Any, seconds: float) -> float:
        """Until ``done`` or the end of the job; looks at its size meanwhile. Returns the time."""
        start = time.monotonic()
        while not job.has_ended() and not done() and time.monotonic() < start + seconds:
            self.growth.look(job)
            time.sleep(0.3)
        return time.monotonic() - start

    def _note(self, disturbance: Disturbance) -> None:
        self.done.append(disturbance)
        print(json.dumps(dataclasses.asdict(disturbance)), flush=True)


def _names_of(name: str, victim: psutil.Process) -> tuple[str, ...]:
    """Texts that name a process."""
    names = (f"process {victim.pid}", f"pid {victim.pid}", f"pid(s) {victim.pid}")
    return names if name.startswith("child") else (name, *names)


def write_tokens(prefix: Path) -> None:
    """A corpus of documents of 3 to 32 tokens."""
    drawn = random.Random(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(1000):
        length = drawn.randint(3, 32)
        builder.add_document(torch.tensor([drawn.randrange(100) for _ in range(length)]), [length])
    builder.finalize(f"{prefix}.idx")


@contextlib.contextmanager
def hosts_if_possible() -> Iterator[Hosts | None]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield None
        return
    with two_hosts() as made:
        yield made


def report(soak: Soak, seconds: float) -> int:
    """Print the tables; the number of faults."""
    print(f"\n| disturbance | of | number | ended in s, longest | named | faults |\n|{'---|' * 6}")
    rows: dict[tuple[str, str], list[Disturbance]] = defaultdict(list)
    for each in soak.done:
        rows[each.kind, each.victim].append(each)
    for (kind, victim), group in sorted(rows.items()):
        named = sum(bool(each.said) for each in group)
        longest = max(each.seconds for each in group)
        faults = sum(bool(each.faults) for each in group)
        print(f"| {kind} | {victim} | {len(group)} | {longest:.1f} | {named} | {faults} |")
    grown = soak.growth.most()
    print(f"\n| {seconds / 60:.0f} minutes | |\n|---|---|\n| disturbances | {len(soak.done)} |")
    print(f"| whole laps of {ITERATIONS} iterations | {soak.laps} |")
    print(f"| losses compared, unequal | {soak.compared}, {soak.unequal} |")
    print(f"| ranks whose growth was measured | {soak.growth.ranks()} |")
    for name, bound in BOUNDS.items():
        print(f"| largest growth of a rank, {name}, of {bound:g} allowed | {grown[name]:.1f} |")
    return (
        sum(bool(each.faults) for each in soak.done)
        + soak.unequal
        + sum(grown[name] > bound for name, bound in BOUNDS.items())
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/soak.sh")
    parser.add_argument("hours", nargs="?", type=float, default=1 / 3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="dpp-soak-") as name,
        mounted(Path(name), DISK_BYTES) as disk,
        hosts_if_possible() as hosts,
    ):
        soak = Soak(Path(name), hosts, disk, options.seed)
        try:
            soak.run(3600 * options.hours)
        finally:
            faults = report(soak, time.monotonic() - start)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
