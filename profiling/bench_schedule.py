#!/usr/bin/env python3
"""Compare pipeline schedules on one model, side by side in one run.

    python profiling/bench_schedule.py --ranks 4 --hidden 4096 --vocabulary 4096 --microbatches 8
    python profiling/bench_schedule.py --ranks 4 --inject transient:2x:20% --microbatches 32
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
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench_check import check
from bench_gpt import Model, reserved

from megatron.dpp.errors import ConfigError

_WARM_UP_STEPS = 8
"""Two eager steps, two that capture graphs (anew, once their memory is known), and some in which a
dynamic schedule may still need one more.
"""


@dataclass(frozen=True)
class Name:
    """What a schedule's name on the command line stands for."""

    text: str
    laid: bool
    mode: str
    kind: str
    num_chunks: int
    lookahead: float | None
    ahead: bool

    @classmethod
    def parse(cls, text: str) -> Name:
        match = re.fullmatch(
            r"(laid)?(eager|graph|traced)?(late)?(static|fused|split)(\d+)(?:@([\d.]+))?", text
        )
        unknown = match is None or (match[4] == "static" and bool(match[3] or match[2] == "traced"))
        if not torch.cuda.is_available() and match is not None:
            unknown |= bool(match[1] or match[3]) or match[2] in ("eager", "graph")  # they sleep
        if match is None or unknown:
            raise SystemExit(
                f"--schedules {text}: expected static, fused or split and the number of chunks, "
                "as in static2,split2 (prefixes: --help)"
            )
        lookahead = float(match[6]) if match[6] else None
        mode, laid, ahead = match[2] or "", bool(match[1]), not match[3]
        return cls(text, laid, mode, match[4], int(match[5]), lookahead, ahead)

    @property
    def model(self) -> tuple[int, bool]:
        """Schedules with the same one run the same model."""
        return self.num_chunks, self.laid


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="pipeline size")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--sequence-parallel", action="store_true", help="with --tensor")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--schedules",
        default="static1,static2,static4,fused2,split1,split2,split4",
        help="static, fused or split, followed by the number of chunks per rank; with a prefix, "
        "eagersplit2 never uses CUDA graphs, graphsplit2 and graphstatic2 always do, "
        "tracedsplit2 writes a trace, laidsplit2 has --layout, latesplit2 launches no task ahead "
        "of its input, and split2@1.5 has a --lookahead of its own",
    )
    parser.add_argument("--layout", help="as --pipeline-model-parallel-layout, for laid... ones")
    parser.add_argument("--inject", default="", help="variability, as --dpp-inject; none if empty")
    parser.add_argument("--cap", default="auto", help="as --dpp-activation-cap")
    parser.add_argument("--transport", default="auto", help="as --dpp-transport")
    parser.add_argument(
        "--static-transport", default="auto", help="for static schedules; auto: NCCL, as they are"
    )
    parser.add_argument("--lookahead", type=float, default=-1.0, help="as --dpp-lookahead, in ms")
    parser.add_argument("--slots", type=int, default=2, help="as --dpp-slots")
    parser.add_argument("--recompute", choices=["selective", "full"])
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_true")
    parser.add_argument("--cross-entropy-loss-fusion", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0, help="hidden and attention dropout")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=3, help="timed steps per round")
    parser.add_argument("--verify", action="store_true", help="compare losses and gradients")
    parser.add_argument("--trace-dir", type=Path, default=Path("benchmark"), help="for traced ones")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="a chunk's F without a GPU")
    args = parser.parse_args()
    args.names = [Name.parse(text) for text in args.schedules.split(",")]
    if any(name.laid for name in args.names) and not args.layout:
        _refuse("--schedules has laid... ones: --layout says how")
    try:
        check(args)
    except ConfigError as error:
        _refuse(str(error).replace("--dpp-activation-cap", "--cap"))
    return args


def _refuse(text: str) -> NoReturn:
    print(f"bench_schedule.py: {text}", file=sys.stderr)
    raise SystemExit(2)


class Traced:
    """A schedule with the trace on, and the file that it writes."""

    def __init__(self, model: Model) -> None:
        from megatron.dpp.trace import TraceLayout, open_recorder

        args, rank = model.args, dist.get_rank()
        layout = TraceLayout(
            data=0, pipeline=rank // args.tensor, tensor=rank % args.tensor, data_size=1,
            pipeline_size=args.ranks, tensor_size=args.tensor, num_chunks=model.num_chunks,
        )  # fmt: skip
        folder = args.trace_dir / f"traced{model.num_chunks}"
        self.recorder = open_recorder(folder, rank=dist.get_rank(), layout=layout, device="cuda")
        self.schedule: Any = None
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
        config = DppConfig(inject=inject, cuda_graphs=graphs, transport=args.static_transport)
        return StaticSchedule(config, log=_say)
    config = DppConfig(
        split_backward=name.kind == "split",
        cuda_graphs={"eager": "off", "graph": "on"}.get(name.mode, "auto"),
        activation_cap=args.cap,
        transport=args.transport,
        lookahead=args.lookahead if name.lookahead is None else name.lookahead,
        slots=args.slots,
        launch_ahead=name.ahead,
        inject=inject,
        timeout=120.0,
    )
    if name.mode != "traced":
        return DppSchedule(config, log=_say)
    traced = Traced(model)
    traced.schedule = DppSchedule(config, log=_say, recorder=traced.recorder)
    return traced


def timed_step(model: Model, schedule: Any, num_microbatches: int) -> float:
    """Milliseconds of one step on the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    model.step(schedule, num_microbatches)
    torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - start) * 1e3], device="cuda")
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took.item())


def verify(model: Model, names: list[Name], num_microbatches: int) -> dict[str, bool]:
    """Whether each schedule's losses and gradients equal the first one's, on every rank."""
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
        flag = torch.tensor([int(same)], device="cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        equal[name.text] = bool(flag.item())
        del got
        schedule.close()
    torch.use_deterministic_algorithms(False)
    return equal


def peak_memory(model: Model, schedule: Any, num_microbatches: int, before: int) -> int:
    """Bytes that the model and one schedule need on the worst rank, as reserved from the device.

    ``before`` is what was reserved without this schedule: others keep memory of their own.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.step(schedule, num_microbatches)
    peak = torch.tensor([torch.cuda.max_memory_reserved() - before], device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak.item())


def injected(schedule: Any) -> float:
    """Milliseconds by which tasks were prolonged so far, the most prolonged rank's."""
    most = torch.tensor([schedule.injected_seconds * 1e3], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most.item())


def own_work(schedule: Any, num_microbatches: int) -> float:
    """Milliseconds of device time of this rank's own tasks in one step, the busiest rank's."""
    work = schedule.own_work_seconds(num_microbatches) * 1e3 if schedule else 0.0
    busiest = torch.tensor([work], device="cuda")
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    return float(busiest.item())


def typical(times: list[float], injected: bool) -> float:
    """The median step; where every step is slowed differently, the mean of all."""
    return statistics.fmean(times) if injected else statistics.median(times)


def measure(model: Model, names: list[Name], num_microbatches: int) -> list[dict[str, Any]]:
    """All schedules of one number of chunks, in turns."""
    args = model.args
    times: dict[Name, list[float]] = {name: [] for name in names}
    schedules, memory, prolonged = {}, {}, dict.fromkeys(names, 0.0)
    for name in names:
        before = reserved() - model.num_bytes
        schedules[name] = make_schedule(model, name)
        for _ in range(_WARM_UP_STEPS):
            model.step(schedules[name], num_microbatches)
        memory[name] = peak_memory(model, schedules[name], num_microbatches, before)
    for _ in range(args.rounds):
        for name, schedule in schedules.items():
            model.step(schedule, num_microbatches)
            before = injected(schedule)
            for _ in range(args.iterations):
                times[name].append(timed_step(model, schedule, num_microbatches))
            prolonged[name] += (injected(schedule) - before) / (args.rounds * args.iterations)
    rows = []
    for name, schedule in schedules.items():
        dynamic = name.kind != "static"
        rows.append(
            {
                "schedule": name.text,
                "microbatches": num_microbatches,
                "ms": typical(times[name], bool(args.inject)),
                "spread_ms": [min(times[name]), max(times[name])],
                "injected_ms": prolonged[name],
                "own_work_ms": own_work(schedule if dynamic else None, num_microbatches),
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
        f"inject {args.inject or 'nothing'}, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}"
    )
    print(
        "m  | schedule | ms (min..max) | / best static | / own work | tokens/s | TFLOP/s per GPU | "
        "peak GB | us/task | injected ms | equal"
    )
    print("---|---|---|---|---|---|---|---|---|---|---")
    for num_microbatches in args.microbatches:
        mine = [r for r in rows if r["microbatches"] == num_microbatches]
        static = [r["ms"] for r in mine if "static" in r["schedule"]]
        for r in mine:
            ratio = f"{r['ms'] / min(static):.3f}" if static else "-"
            own = f"{r['ms'] / r['own_work_ms']:.3f}" if r["own_work_ms"] else "-"
            low, high = r["spread_ms"]
            host = f"{r['host_us_per_task']:.0f}" if r["host_us_per_task"] else "-"
            print(
                f"{num_microbatches} | {r['schedule']} | {r['ms']:.1f} ({low:.0f}..{high:.0f}) | "
                f"{ratio} | {own} | {_throughput(args, r)} | {r['peak_gb']:.2f} | {host} | "
                f"{r['injected_ms']:.0f} | {r['equal']}"
            )
    if args.json:
        facts = {"arguments": vars(args), "rows": rows}
        args.json.write_text(json.dumps(facts, default=str))


def _throughput(args: argparse.Namespace, row: dict[str, Any]) -> str:
    """Tokens per second, and the model's operations as ``train.flops`` counts them, of a row."""
    tokens = row["microbatches"] * args.micro_batch * args.sequence
    layer = 12 * args.hidden**2 + args.sequence * args.hidden
    operations = 6 * tokens * (args.layers * layer + args.hidden * args.vocabulary)
    seconds, num_gpus = row["ms"] * 1e-3, args.ranks * args.tensor
    return f"{tokens / seconds:,.0f} | {operations / seconds / num_gpus / 1e12:.0f}"


def launch(num_ranks: int) -> int:
    """Start this script once per rank; the first failure ends them all."""
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29577"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return 1
            time.sleep(0.1)
        return max(process.returncode for process in processes)
    finally:
        for process in processes:
            process.kill()


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available():
        import bench_sleeping

        return bench_sleeping.run(args)
    if "RANK" not in os.environ:
        return launch(args.ranks * args.tensor)
    worker(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
