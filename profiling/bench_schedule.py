#!/usr/bin/env python3
"""Compare pipeline schedules on one model, side by side in one run.

    python profiling/bench_schedule.py --ranks 4 --hidden 4096 --vocabulary 4096 --microbatches 8
    python profiling/bench_schedule.py --ranks 4 --inject transient:2x:20% --microbatches 32
    python profiling/bench_schedule.py --ranks 2 --experts 8 --expert-parallel 2 --microbatches 16
    python profiling/bench_schedule.py --ranks 2 --vocabulary 50304 --schedules static2,laidsplit2 \
        --layout 'Etttt|ttttt|ttttt|ttL'

On GPUs every rank builds the same GPT once per number of chunks and runs megatron-core's 1F1B or
interleaved schedule and ours, fused and split, in turns. Printed per schedule: the median time of
forward and backward (slowest rank), the ratio to the best static schedule and to the busiest rank's
own work, peak memory of the worst rank, and whether losses and gradients equal the static
schedule's bit by bit (deterministic kernels). Without a GPU it runs stages that sleep
(bench_sleeping.py), so that two cores can stand for eight ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import arms
import harness
import torch
import torch.distributed as dist
from bench_gpt import Model, reserved

from megatron.dpp.errors import ConfigError, exit_with, require
from megatron.dpp.inject import Injector
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.schedule.reference import padded_microbatches

_WARM_UP_STEPS = 8
"""Two eager steps, two that capture graphs, and some in which a dynamic one may need one more."""
_TIMED_STEPS = 3
"""Of a round."""
_SCHEDULES = (
    "static, megatron (its order, split backward), fused or split, and the number of chunks per "
    "rank; with a prefix, eagersplit2 never uses CUDA graphs, graphsplit2 and graphstatic2 always "
    "do, linksstatic2 uses our links, capsplit2 has the cap static, tracedsplit2 writes a trace, "
    "and laidsplit2 has --layout"
)

_COUNTS = ("ranks", "tensor", "layers", "hidden", "heads", "sequence", "vocabulary", "micro_batch",
           "rounds", "topk", "expert_parallel", "runs")  # fmt: skip

over_ranks = partial(harness.over_ranks, device="cuda")


@dataclass(frozen=True)
class Name:
    """A schedule's name on the command line, taken apart."""

    text: str
    laid: bool
    mode: str
    kind: str
    num_chunks: int
    links: bool = False
    capped: bool = False

    @classmethod
    def parse(cls, text: str) -> Name:
        match = re.fullmatch(
            r"(laid)?(eager|graph|traced)?(links|cap)?(static|megatron|fused|split)(\d+)",
            text,
        )
        unknown = match is None or (match[4] == "static" and match[2] == "traced")
        if match is not None and match[3]:
            unknown |= (match[4] == "static") != (match[3] == "links")
        if not torch.cuda.is_available() and match is not None:
            unknown |= bool(match[1]) or match[2] in ("eager", "graph")  # they sleep
        if match is None or unknown:
            raise ConfigError(
                f"--schedules {text}: expected static, megatron, fused or split and the number of "
                "chunks, as in static2,split2 (prefixes: --help)"
            )
        mode, laid = match[2] or "", bool(match[1])
        links, capped = match[3] == "links", match[3] == "cap"
        return cls(text, laid, mode, match[4], int(match[5]), links, capped)

    @property
    def arm(self) -> str:
        """The name in :data:`arms.ARMS`."""
        if self.kind == "static":
            graphs = self.mode == "graph"
            if self.links:
                return arms.GRAPHS_LINKS if graphs else arms.LINKS
            return arms.GRAPHS if graphs else arms.STATIC
        name = {"split": "dynamic"}.get(self.kind, self.kind)
        return f"{name}, cap static" if self.capped else name

    @property
    def model(self) -> tuple[int, bool]:
        """Schedules with the same one run the same model."""
        return self.num_chunks, self.laid


def parse_arguments() -> argparse.Namespace:
    parser = harness.new_parser(
        __doc__,
        ranks=(4, "pipeline size"),
        tensor=(1, "tensor-parallel size"),
        sequence_parallel=(False, "with --tensor"),
        experts=(0, "of each layer; none if 0"),
        topk=(2, "experts of a token"),
        expert_hidden=(0, "of an expert; 4 x --hidden if 0"),
        expert_parallel=(1, "expert-parallel size; its ranks are replicas of the rest"),
        grouped_gemm=(False, "as --moe-grouped-gemm"),
        layers=16,
        hidden=4096,
        heads=32,
        sequence=2048,
        vocabulary=4096,
        micro_batch=2,
        schedules=("static1,static2,static4,fused2,split1,split2,split4", _SCHEDULES),
        inject=("", "variability, as --dpp-inject; none if empty"),
        cap=("auto", "as --dpp-activation-cap"),
        transport=("auto", "as --dpp-transport"),
        static_transport=("auto", "for static schedules; auto: NCCL, as they are"),
        no_gradient_accumulation_fusion=False,
        dropout=(0.0, "hidden and attention dropout"),
        rounds=4,
        runs=(1, "runs of all ranks, for each of --queues in turns"),
        queues=("", "numbers of hardware queues, as 1,8; the environment's if empty"),
        verify=(False, "compare losses and gradients"),
        sleep_ms=(20.0, "a chunk's F without a GPU"),
    )
    add = parser.add_argument
    add("--microbatches", type=int, nargs="+", default=[8], metavar="N", help="one run of each")
    add("--layout", help="as --pipeline-model-parallel-layout, for laid... ones")
    add("--trace-dir", type=Path, default=Path("benchmark"), metavar="DIR", help="of traced ones")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    args.names = [Name.parse(text) for text in args.schedules.split(",")]
    if any(name.laid for name in args.names) and not args.layout:
        raise ConfigError("--schedules has laid... ones, which need --layout")
    try:
        _check(args)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--dpp-activation-cap", "--cap")) from None
    return args


def _check(args: argparse.Namespace) -> None:
    """Refuse a parsed command line that cannot run: a ConfigError names flag, value and rule."""
    for name in _COUNTS:
        _at_least_one(f"--{name.replace('_', '-')}", getattr(args, name))
    require(args.sleep_ms > 0, f"--sleep-ms {args.sleep_ms:g}: must be above 0")
    require(
        args.experts % args.expert_parallel == 0 and (args.experts or args.expert_parallel == 1),
        f"--experts {args.experts} and --expert-parallel {args.expert_parallel}: the ranks of a "
        "group must share the experts evenly",
    )
    require(
        not args.experts or args.topk <= args.experts,
        f"--topk {args.topk}: --experts {args.experts} is less",
    )
    for num in args.microbatches:
        _at_least_one("--microbatches", num)
        for name in args.names:
            _check_schedule(args, name, num)


def _at_least_one(flag: str, value: int) -> None:
    require(value >= 1, f"{flag} {value}: must be at least 1")


def _check_schedule(args: argparse.Namespace, name: Name, num: int) -> None:
    _at_least_one(f"--schedules {name.text}: chunks", name.num_chunks)
    geometry = Geometry(args.ranks, 0, name.num_chunks, num)
    if name.kind == "static":
        least = padded_microbatches(geometry)
        require(
            least == num,
            f"--schedules {name.text} with --microbatches {num}: megatron-core's interleaved "
            f"schedule wants a multiple of the ranks, {args.ranks}; {least} would do",
        )
    else:
        parse_cap(args.cap, geometry)
    if args.inject:
        Injector(args.inject, 0, args.ranks, num_chunks=name.num_chunks)


def _num_gpus(args: argparse.Namespace) -> int:
    return int(args.ranks * args.tensor * args.expert_parallel)


class Traced:
    """A schedule with the trace on, and the file that it writes."""

    def __init__(self, model: Model, make: Callable[..., Any]) -> None:
        folder = model.args.trace_dir / f"traced{model.num_chunks}"
        self.recorder = harness.open_trace(model.args, model.num_chunks, folder, device="cuda")
        self.schedule: Any = make(recorder=self.recorder)
        self._iteration = 0

    def __call__(self, **keywords: Any) -> list[Any]:
        self.recorder.begin_iteration(self._iteration)
        result: list[Any] = self.schedule(**keywords)
        self.recorder.end_iteration()
        self._iteration += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def close(self) -> None:
        self.schedule.close()
        self.recorder.close()


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def make_schedule(model: Model, name: Name) -> Any:
    """The schedule that a name such as ``static2`` or ``split4`` stands for."""
    from megatron.dpp import DppConfig, DppSchedule
    from megatron.dpp.runtime.static import StaticSchedule

    args = model.args
    inject = args.inject or None
    if name.kind == "static":
        graphs = "on" if name.mode == "graph" else "off"
        transport = args.transport if name.links else args.static_transport
        if name.links and transport == "auto":
            transport = "cuda_ipc"
        config = DppConfig(inject=inject, cuda_graphs=graphs, transport=transport)
        return StaticSchedule(config, log=_say)
    arm = arms.ARMS[name.arm]
    config = DppConfig(
        policy=arm.policy or "dynamic",
        split_backward=arm.split,
        cuda_graphs={"eager": "off", "graph": "on"}.get(name.mode, "auto"),
        activation_cap=args.cap if arm.cap == "auto" else arm.cap,
        transport=args.transport,
        inject=inject,
        timeout=120.0,
    )
    make = partial(DppSchedule, config, log=_say)
    return Traced(model, make) if name.mode == "traced" else make()


def timed_step(model: Model, schedule: Any, num_microbatches: int) -> tuple[float, float]:
    """Milliseconds of one step on the slowest rank, and of them injected on the most prolonged."""
    (before,) = over_ranks(schedule.injected_seconds)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    model.step(schedule, num_microbatches)
    torch.cuda.synchronize()
    took, after = over_ranks(time.perf_counter() - start, schedule.injected_seconds)
    return took * 1e3, (after - before) * 1e3


def verify(model: Model, names: list[Name], num_microbatches: int) -> dict[str, bool]:
    """Per schedule: True where losses and gradients equal the first one's on every rank."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    expected: Any = None
    equal = {}
    for name in names:
        schedule = make_schedule(model, name)  # anew: what is captured is deterministic, too
        for _ in range(_WARM_UP_STEPS):
            model.step(schedule, num_microbatches)
        losses = [entry["lm loss"].item() for entry in model.step(schedule, num_microbatches)]
        got = (losses, model.gradients())
        expected = expected or got
        same = losses == expected[0] and all(
            torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True)
        )
        equal[name.text] = over_ranks(same, least=True) == [1.0]
        del got
        schedule.close()
    torch.use_deterministic_algorithms(False)
    return equal


def peak_memory(model: Model, schedule: Any, num_microbatches: int, before: int) -> float:
    """Bytes that the model and one schedule need on the worst rank, as reserved from the device.

    ``before`` is what was reserved without this schedule: others keep memory of their own.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.step(schedule, num_microbatches)
    return over_ranks(torch.cuda.max_memory_reserved() - before)[0]


def measure(model: Model, names: list[Name], num_microbatches: int) -> list[dict[str, Any]]:
    """All schedules of one number of chunks, in turns."""
    args = model.args
    schedules, memory = {}, {}
    for name in names:
        before = reserved() - model.num_bytes
        schedules[name] = make_schedule(model, name)
        for _ in range(_WARM_UP_STEPS):
            model.step(schedules[name], num_microbatches)
        memory[name] = peak_memory(model, schedules[name], num_microbatches, before)
    arms = {
        name: partial(timed_step, model, schedule, num_microbatches)
        for name, schedule in schedules.items()
    }
    samples = harness.take_turns(arms, args.rounds, _TIMED_STEPS)
    rows = []
    for name, schedule in schedules.items():
        times, prolonged = zip(*samples[name], strict=True)
        # Where every step is slowed differently, the mean of all is the typical one.
        typical = statistics.fmean if args.inject else statistics.median
        dynamic = name.kind != "static"
        own = schedule.own_work_seconds(num_microbatches) if dynamic else 0.0
        rows.append(
            {
                "schedule": name.text,
                "microbatches": num_microbatches,
                "ms": typical(times),
                "spread_ms": [min(times), max(times)],
                "all_ms": times,
                "injected_ms": statistics.fmean(prolonged),
                "own_work_ms": over_ranks(own)[0] * 1e3,
                "peak_gb": memory[name] / 1e9,
                "equal": None,
                "host_us_per_task": schedule.host_us_per_task if dynamic else None,
            }
        )
        schedule.close()
    equal = verify(model, names, num_microbatches) if args.verify else {}
    return [row | {"equal": equal.get(row["schedule"])} for row in rows]


def worker(args: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows: list[dict[str, Any]] = []
    for num_chunks, laid in sorted({name.model for name in args.names}):
        model = Model(args, num_chunks, args.layout if laid else None)
        mine = [name for name in args.names if name.model == (num_chunks, laid)]
        for num_microbatches in args.microbatches:
            rows += measure(model, mine, num_microbatches)
        model.close()
    if dist.get_rank() == 0:
        report(args, rows)
    dist.destroy_process_group()


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table, and write JSON when asked to."""
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}, sequence "
        f"{args.sequence}, micro batch {args.micro_batch}, PP={args.ranks}, TP={args.tensor}, "
        f"EP={args.expert_parallel} of {args.experts} experts, "
        f"inject {args.inject or 'nothing'}, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}\n"
    )
    shown = []
    for num_microbatches in args.microbatches:
        mine = [r for r in rows if r["microbatches"] == num_microbatches]
        static = [r["ms"] for r in mine if "static" in r["schedule"]]
        shown += [_cells(args, r, min(static, default=None)) for r in mine]
    harness.print_table(
        "m | schedule | ms (min..max) | / best static | / own work | tokens/s | TFLOP/s per GPU | "
        "peak GB | us/task | injected ms | equal",
        shown,
    )
    harness.write_json(args.json, {"arguments": vars(args), "rows": rows})


def _cells(args: argparse.Namespace, row: dict[str, Any], static: float | None) -> list[object]:
    """A line of the table; ``static`` is the best static schedule's time in ms."""
    tokens = row["microbatches"] * args.micro_batch * args.sequence * args.expert_parallel
    feed_forward = 8 * args.hidden**2
    if args.experts:  # SwiGLU has three matrices
        feed_forward = args.topk * 3 * args.hidden * (args.expert_hidden or 4 * args.hidden)
    layer = 4 * args.hidden**2 + feed_forward + args.sequence * args.hidden
    operations = 6 * tokens * (args.layers * layer + args.hidden * args.vocabulary)
    seconds, num_gpus = row["ms"] * 1e-3, _num_gpus(args)
    low, high = row["spread_ms"]
    return [
        row["microbatches"],
        row["schedule"],
        f"{row['ms']:.1f} ({low:.0f}..{high:.0f})",
        f"{row['ms'] / static:.3f}" if static else "-",
        f"{row['ms'] / row['own_work_ms']:.3f}" if row["own_work_ms"] else "-",
        f"{tokens / seconds:,.0f}",
        f"{operations / seconds / num_gpus / 1e12:.0f}",
        f"{row['peak_gb']:.2f}",
        f"{row['host_us_per_task']:.0f}" if row["host_us_per_task"] else "-",
        f"{row['injected_ms']:.0f}",
        row["equal"],
    ]


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available():
        import bench_sleeping

        return bench_sleeping.run(args)
    if "RANK" not in os.environ:
        found = harness.start_in_turns(
            _num_gpus(args), args.runs, args.queues.split(","), CUBLAS_WORKSPACE_CONFIG=":4096:8"
        )
        arms.print_schedules(args.names, [(queues, facts["rows"]) for queues, facts in found])
        runs = [{"queues": queues, **facts} for queues, facts in found]
        harness.write_json(args.json, {"arguments": vars(args), "runs": runs})
        return 0
    worker(args)
    return 0


if __name__ == "__main__":
    exit_with(main)
