#!/usr/bin/env python3
"""Account for the memory that static and dynamic schedules reserve, two ranks on one GPU or on two.

    python profiling/bench_reserved.py --out build/reserved

Two cases: sequences of unlike length (as bench_lengths.py), and the 345M model with equal lengths
(as bench_schedule.py). Every arm runs its batches untimed, then again with peaks counted, and once
more with every block of the caching allocator recorded. Printed for the worst rank: peak allocated
and reserved memory, what lives at these peaks, and what is reserved between blocks that live. Times
mean nothing where ranks share a GPU. ``--out`` gets the records, for ``allocations.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from allocations import analyse, record

from megatron.dpp.errors import exit_with

CONF = "PYTORCH_ALLOC_CONF"
SETTINGS = {
    "expandable": "expandable_segments:True",
    "plain": "",
    "rounded": "expandable_segments:True,roundup_power2_divisions:8",
}
"""Settings of the allocator, by name."""

_FEW = ("static drawn", "ours drawn, cap static", "W last drawn, cap static")
LENGTH_ARMS = {
    "expandable": (
        *_FEW, "half drawn, cap static", "fused drawn, cap static",
        "static sorted", "ours sorted, cap static", "W last sorted, cap static",
        "static packed", "ours packed, cap static", "W last packed, cap static", "ours drawn",
    ),
    "plain": _FEW,
    "rounded": _FEW,
}  # fmt: skip
JOBS = (("lengths", "expandable"), ("equal", "expandable"), ("lengths", "rounded"),
        ("lengths", "plain"))  # fmt: skip
"""Case and setting of each job, the more important first."""
EQUAL_ARMS = ("static", "static graphs", "ours", "ours graphs")


# One process per rank


def run_lengths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per arm: microbatches of unlike length."""
    import bench_lengths_gpu as lengths
    from bench_gpt import Model
    from lengths_plans import Plans

    from megatron.dpp.sim.lengths import LengthCosts

    lengths.ARMS.update(_further_arms(lengths.Arm))
    model = Model(args, args.chunks, None)
    model.config.variable_seq_lengths = True
    model.config.moe_token_dispatcher_type = "alltoall"
    rng = random.Random(args.seed)
    batches = [
        Plans(
            args.lengths, rng, rows=args.microbatches, ranks=args.ranks, chunks=args.chunks,
            longest=args.sequence, costs=LengthCosts.transformer(args.hidden),
        )
        for _ in range(args.batches)
    ]  # fmt: skip
    rows = []
    for name in LENGTH_ARMS[args.setting]:
        arm = lengths.ARMS[name]
        plans = [arm.microbatches(batch) for batch in batches]
        schedule = arm.schedule(args)
        steps = [
            lambda each=each: lengths._step(model, schedule, each)  # noqa: B023
            for each in plans
        ]
        rows.append(measure(args, "lengths", name, schedule, steps, recorded=args.recorded))
        schedule.close()
    model.close()
    return rows


def _further_arms(make: Any) -> dict[str, Any]:
    class Other(make):  # type: ignore[misc]
        """The dynamic schedule with another policy."""

        policy: Any = None

        def schedule(self, args: argparse.Namespace) -> Any:
            schedule = super().schedule(args)
            schedule.policy = self.policy
            return schedule

    arms = {"fused drawn, cap static": make("drawn", "static", split=False)}
    for name, share in (("W last", math.inf), ("half", 0.5)):
        for plan in ("drawn", "sorted", "packed"):
            arm = arms[f"{name} {plan}, cap static"] = Other(plan, "static")
            object.__setattr__(arm, "policy", _weights_first(share))
    return arms


def _weights_first(share: float) -> Callable[[Any], Any]:
    """The dynamic policy, but deferred weight gradients run before a forward with which more than
    this share of the lowest limit would be held.
    """
    from megatron.dpp.schedule import Kind
    from megatron.dpp.schedule.policies import dynamic

    def policy(view: Any) -> Any:
        view.weights_first = False  # what the policy ``dynamic`` does under other caps
        weight, action = view.weight(), dynamic(view)
        if weight is None or action is None or action.kind is not Kind.F:
            return action
        budget = min(view._budgets, key=lambda one: one.limit)
        place = view._reference.places[Kind.F][action.chunk][action.microbatch]
        held = budget.in_flight + budget.kept + budget._steps[place]
        return weight if held > share * budget.limit else action

    return policy


def run_equal(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per arm: the 345M model, equal lengths."""
    from bench_gpt import Model

    from megatron.dpp import DppConfig, DppSchedule
    from megatron.dpp.runtime.static import StaticSchedule

    equal = {
        "layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "micro_batch": 8,
        "vocabulary": 50304,
    }  # fmt: skip
    vars(args).update(equal)
    model = Model(args, args.chunks, None)
    rows = []
    for name in EQUAL_ARMS:
        graphs = "on" if "graphs" in name else "off"
        if name.startswith("static"):
            config = DppConfig(cuda_graphs=graphs, transport=args.static_transport)
            schedule: Any = StaticSchedule(config)
        else:
            schedule = DppSchedule(DppConfig(cuda_graphs=graphs, timeout=120.0))
        step = lambda: model.step(schedule, 16)  # noqa: E731, B023
        for _ in range(4 if graphs == "on" else 0):
            step()
        row = measure(args, "equal", name, schedule, [step], recorded=0 if graphs == "off" else -1)
        schedule.close()
        rows.append(row)
    model.close()
    return rows


def measure(
    args: argparse.Namespace,
    case: str,
    name: str,
    schedule: Any,
    steps: Sequence[Callable[[], Any]],
    *,
    recorded: int,
) -> dict[str, Any]:
    """The peaks of a schedule's steps on this rank, in bytes.

    Args:
        recorded: number of the step that is recorded; -1 for none.
    """
    import torch

    start = time.perf_counter()
    _reset()
    before = torch.cuda.memory_reserved()
    for step in steps:
        step()
    first = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    each = []
    for step in steps:
        _reset()
        step()
        each.append(_peaks())
    _reset()
    for step in steps:
        step()
    row: dict[str, Any] = {
        "case": case, "setting": args.setting, "arm": name, "rank": args.rank, "before": before,
        "first reserved": first[0], "first allocated": first[1], "each": each, **_peaks(),
        **_facts(schedule),
    }  # fmt: skip
    if 0 <= recorded < len(steps) and args.setting == "expandable":
        _reset()
        kept = {"name": f"{case} {name}", "rank": args.rank} | record(steps[recorded])
        path = Path(args.out) / f"records.rank{args.rank}.gz"
        with gzip.open(path, "at", encoding="utf-8") as file:
            file.write(json.dumps(kept) + "\n")
        row["record"] = analyse(kept)
    row["seconds"] = time.perf_counter() - start
    return row


def _reset() -> None:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _peaks() -> dict[str, int]:
    import torch

    found = torch.cuda.memory_stats()
    names = ("allocated", "reserved", "active", "inactive_split", "requested")
    peaks = {name: found.get(f"{name}_bytes.all.peak", 0) for name in names}
    return {**peaks, "retries": found.get("num_alloc_retries", 0)}


def _facts(schedule: Any) -> dict[str, Any]:
    """The schedule's own figures of its memory."""
    sessions = schedule.__dict__.get("_sessions")
    if sessions is None or sessions.current is None:
        return {}
    session = sessions.current
    decisions = session.decisions
    measured = decisions._measured
    slots = [spec.slot_bytes * spec.depth for spec in session.links.transport.incoming]
    graphs = schedule._prepared.graphs
    return {
        "cap": decisions.cap, "peak held": schedule.peak_held,
        "activation bytes": measured.activation_bytes if measured else 0,
        "deferred bytes": measured.deferred_bytes if measured else 0,
        "head room": measured.head_room if measured else 0,
        "channel slots": sum(slots), "graph slot": graphs.slot_bytes(0.0) if graphs else 0,
    }  # fmt: skip


# The parent


def start(args: argparse.Namespace, case: str, setting: str, end: float) -> list[dict[str, Any]]:
    """The rows of a job; none of one that failed or ran into the deadline, which is said."""
    import torch

    port, path = harness.free_port(), str(harness.ROOT)
    shared = str(harness.ROOT / "profiling" / "shared_gpus")
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port)}  # fmt: skip
    paths = [path, os.environ.get("PYTHONPATH", "")]
    if torch.cuda.device_count() < args.ranks:
        environment["NUM_GPUS"] = str(torch.cuda.device_count())
        paths.insert(0, shared)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment[CONF] = SETTINGS[setting]
    command = [sys.executable, *sys.argv, "--case", case, "--setting", setting]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(args.ranks)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > end:
                print(f"{case}, {setting}: not finished", flush=True)
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = []
    for file in sorted(Path(args.out).glob(f"rows.{case}.{setting}.*.json")):
        found += json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    return found


def report(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Print what was recorded of the rank that reserved most, and a table of these ranks; write
    the same of every rank to ``path``.
    """
    arms: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault((row["case"], row["setting"], row["arm"]), []).append(row)
    worst = [max(each, key=lambda row: row["reserved"]) for each in arms.values()]
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        _print(rows, arms)
    _print(worst, arms)


def _print(
    rows: Sequence[dict[str, Any]], arms: dict[tuple[str, str, str], list[dict[str, Any]]]
) -> None:
    def ratio(row: dict[str, Any], name: str) -> str:
        arm = row["arm"]
        own, static = (
            [each[name] for each in arms.get((row["case"], row["setting"], one), ())]
            for one in (arm, static_of(arm))
        )
        return f"{max(own) / max(static):.3f}" if static else "-"

    def gb(row: dict[str, Any], *names: str) -> list[str]:
        return [f"{row.get(name, 0) / 1e9:.2f}" for name in names]

    for row in rows:
        if "record" in row:
            print_record(row, row["record"])
    print("\nGB. 'first': with the first step. '/ static': the worst rank over the worst rank of "
          "the static arm in the same order.\n")  # fmt: skip
    lines = [
        (row["case"][:3], row["setting"][:5], row["arm"].replace(", cap static", " (static)"),
         row["rank"], *gb(row, "allocated", "active", "reserved", "first reserved"),
         f"{row['reserved'] / row['allocated']:.3f}",
         " ".join(f"{each['reserved'] / each['allocated']:.2f}" for each in row["each"]),
         ratio(row, "allocated"), ratio(row, "reserved"), ratio(row, "first reserved"),
         f"{row.get('peak held', 0):.2f}/{row.get('cap', 0):.2f}",
         *gb(row, "activation bytes", "deferred bytes", "channel slots", "graph slot"),
         row["retries"], f"{row['seconds']:.0f}")
        for row in rows
    ]  # fmt: skip
    harness.print_table(
        "case | conf | arm | rank | alloc | active | reserved | first | res/alloc | of each | "
        "alloc / static | **res / static** | first / static | held/cap | act | W | slots | graph | "
        "retries | s",
        lines,
    )


def static_of(arm: str) -> str:
    """The static arm of the same order, with graphs or without."""
    if arm in EQUAL_ARMS:
        return arm.replace("ours", "static")
    return f"static {arm.split(',')[0].split()[-1]}"


def print_record(row: dict[str, Any], record: dict[str, Any]) -> None:
    gb = 1e9
    print(f"\n{row['case']} | {row['arm']} | rank {row['rank']}: one batch")
    for name in ("at used", "at reserved"):
        state = record[name]
        parts = sorted(state["categories"].items(), key=lambda each: -each[1])
        print(f"  {name} ({state['running']}): used {state['used'] / gb:.3f}, reserved "
              f"{state['reserved'] / gb:.3f}; "
              + ", ".join(f"{what} {size / gb:.3f}" for what, size in parts))  # fmt: skip
        print(f"    {state['holes']} holes of {state['free'] / gb:.3f}, below 64 MiB "
              f"{state['in holes below 64 MiB'] / gb:.3f}, largest "
              + " ".join(f"{size / gb:.3f}" for size in state["largest holes"]))  # fmt: skip
    for growth in record["growths"][-6:]:
        print(f"  grew by {growth['bytes'] / gb:.3f} with {growth['free before'] / gb:.3f} free in "
              f"{growth['task']}, asked for {growth['asked'] / gb:.3f}")  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    import bench_lengths_gpu
    import torch

    parser = harness.new_parser(
        __doc__,
        out=("build/reserved", "gets records and rows"),
        cases=("all", f"some of {','.join(map('/'.join, JOBS))}"),
        seconds=(230.0, "after which no job goes on"),
        ranks=2,
        chunks=2,
        hidden=(2048, "of the GPT with unlike lengths"),
        heads=16,
        layers=8,
        vocabulary=4096,
        sequence=16384,
        lengths="sft",
        microbatches=32,
        batches=3,
        recorded=(1, "batch that is recorded"),
        seed=0,
        static_transport=("cuda_ipc", "kind of channel of the static schedules; auto: NCCL"),
        case="",
        setting="",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    unknown = set(args.cases.split(",")) - {"all", *map("/".join, JOBS)}
    if unknown:
        parser.error(f"--cases: no {', '.join(sorted(unknown))}; expected all, or some of "
                     f"{','.join(map('/'.join, JOBS))}")  # fmt: skip
    vars(args).update({**bench_lengths_gpu.MODEL, "rank": int(os.environ.get("RANK", 0))})
    return args


def main() -> int:
    args = parse_arguments()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        worker(args)
        return 0
    end, rows = time.monotonic() + args.seconds, []
    for case, setting in JOBS:
        asked = args.cases == "all" or f"{case}/{setting}" in args.cases.split(",")
        if asked and time.monotonic() < end:
            rows += start(args, case, setting, end)
    harness.write_json(Path(args.out) / "rows.json", rows)
    report(rows, Path(args.out) / "report.txt")
    return 0


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = {"lengths": run_lengths, "equal": run_equal}[args.case](args)
    path = Path(args.out) / f"rows.{args.case}.{args.setting}.{args.rank}.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_with(main)
