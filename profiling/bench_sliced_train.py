#!/usr/bin/env python3
"""Slices of long sequences against packed ones, as ``megatron-dpp train`` runs them.

    python profiling/bench_sliced_train.py --ranks 2 --lengths long --longest 65536
    python profiling/bench_sliced_train.py --small                      # tiny sizes, on a CPU

Each arm is a ``train`` command of its own on ``--ranks`` devices: a layout and a schedule for the
same sequences of unlike length, in the same global batches. The arms take turns. An arm that fails
prints the end of its log, and the others go on. The table has the simulated time of a step of these
sequences beside the measured one.

A timed step may be one in which CUDA graphs are captured, or kernels prepared for new lengths: it
takes up to twice as long. ``ms`` is the median of all timed steps, with the least and the greatest,
and ``/ first`` the median over iterations of the ratio to the first arm's step with the same
sequences, so that one such step of five changes neither.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy

from megatron.dpp.errors import exit_with
from megatron.dpp.processes import bound_to_this, exits_on_sigterm
from megatron.dpp.sim.batches import BatchSettings, ways_to_run
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.sim.orders import Question, plan_batch
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.sim.weighing import with_overheads

LENGTHS = ("sft", "long")
LAYERS = ("local", "transformer_engine")
SMALL = {
    "layers": 8, "hidden": 64, "heads": 4, "groups": 2, "ffn": 128, "vocabulary": 256,
    "longest": 512, "median": 60.0, "slice_tokens": 64, "sequences": 16, "steps": 3, "untimed": 1,
}  # fmt: skip
"""Options of ``--small``."""
_SHARE = 10
"""One in so many sequences is long."""
_AGREE = 1e-2
"""Most relative difference between the losses of two arms."""
_END = 15
"""Lines of a failed arm's log."""
_PATIENCE_S = 45.0
"""For an arm to end by itself: torchrun kills its ranks after 30 s."""
_ANY_MEMORY = 10_000
"""GiB of a device, so that no arm is refused or recomputes: the estimate before a run counts every
sequence as the longest."""
_MEMORY = re.compile(r"max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A layout and a schedule.

    Args:
        chunks: model chunks of a pipeline rank; 0 for context parallelism without a pipeline.
        policy: as ``--dpp-policy``; None for megatron-core's schedule.
        slices: as ``--dpp-slice-tokens``; a number that is left open is ``--slice-tokens``.
        split: with tasks of their own for weight gradients.
        cap: as ``--dpp-activation-cap``.
    """

    chunks: int = 1
    policy: str | None = None
    slices: str = "off"
    split: bool = True
    cap: str = "auto"

    def words(self, args: Any) -> list[str]:
        """Its words of ``train``."""
        if not self.chunks:
            words = f"--cp {args.ranks} --pp 1 --no-dpp --use-distributed-optimizer"
            return words.split() if args.small else [*words.split(), *_layers(LAYERS[1])]
        words = f"--pp {args.ranks} --chunks {self.chunks} --packing even --order planned"
        if self.policy is None:
            return [*words.split(), "--no-dpp"]
        words += f" --dpp-policy {self.policy} --dpp-activation-cap {self.cap}"
        words += "" if self.split else " --no-dpp-split-backward"
        return [*words.split(), "--dpp-slice-tokens", self.slices.format(args.slice_tokens)]

    def simulated(self, args: Any, lengths: Sequence[int]) -> tuple[float, float]:
        """Simulated time of a step, in the unit of the costs, and the most tokens whose activations
        a rank holds, through all of its layers; NaN without a pipeline.
        """
        if not self.chunks:
            return math.nan, math.nan
        size = args.hidden // args.heads
        weights = args.hidden * (2 * args.hidden + 2 * args.groups * size + 3 * args.ffn)
        costs, static = LengthCosts.of_layer(weights, args.hidden), self.policy is None
        slices = {"off": None, "auto": 0}.get(self.slices, args.slice_tokens)
        settings = BatchSettings(
            num_ranks=args.ranks, packing="even", budget=args.longest, costs=costs, slices=slices,
            multiple=args.ranks if static and self.chunks > 1 else 1, order="planned",
        )  # fmt: skip
        model = PipelineModel(
            num_ranks=args.ranks, num_chunks=self.chunks, longest=args.longest, costs=costs,
            policy=self.policy, cap=self.cap, split_backward=self.split,
            head=args.hidden * args.vocabulary / (weights * args.layers / args.ranks),
        )  # fmt: skip
        weighs = slices == 0
        ways = {n: each[0] for n, each in ways_to_run(lengths, settings, weighs=weighs).items()}
        found = plan_batch(model, Question(ways, {}, weighs=weighs))
        rows = ways[found.choice.tokens] if found.choice else next(iter(ways.values()))
        step = with_overheads(model).run([rows[i] for i in found.order], found.policy)
        return step.makespan, max(step.peak_held) * args.longest / self.chunks


ARMS = {
    "static": Arm(chunks=2),
    "dynamic": Arm(chunks=2, policy="auto"),
    "static-sliced": Arm(chunks=2, policy="megatron", slices="{}", split=False),
    "static-sliced-1": Arm(policy="megatron", slices="{}", split=False),
    "megatron-sliced": Arm(chunks=2, policy="megatron", slices="{}"),
    "megatron-sliced-1": Arm(policy="megatron", slices="{}"),
    "dynamic-sliced": Arm(policy="dynamic", slices="{}"),
    "dynamic-sliced-cap": Arm(policy="dynamic", slices="{}", cap="static"),
    "auto": Arm(policy="auto", slices="auto"),
    "cp": Arm(chunks=0),
}
"""``static-sliced`` computes weight gradients with the others, ``megatron-sliced`` in the waits of
the same order; a name that ends in 1 has one chunk per rank. On GPUs ``cp`` has Transformer
Engine's layers: local ones attend with a mask of a whole row, and slowly. It does not pack."""


@dataclass
class Found:
    """The measurements of an arm, over its runs.

    Args:
        steps: milliseconds by iteration.
        rates: tokens per second of each timed step.
        losses: by iteration, of the last run; ``norms`` are those of gradients.
        allocated: most bytes of a rank; 0 without a GPU. ``reserved`` likewise.
        failed: why it runs no more.
        seconds: of each whole command.
        simulated: time of a step. ``held``: most tokens that a rank holds.
    """

    steps: dict[int, list[float]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    allocated: float = 0.0
    reserved: float = 0.0
    failed: str = ""
    seconds: list[float] = field(default_factory=list)
    simulated: float = math.nan
    held: float = math.nan

    @property
    def times(self) -> list[float]:
        """All timed steps."""
        return [each for times in self.steps.values() for each in times]

    def add(self, lines: Sequence[Mapping[str, Any]], log: str, untimed: int) -> None:
        """Add a run's metrics and memory."""
        for line in lines:
            if "lm loss" not in line or "seconds" not in line:
                continue  # an evaluation, or the parameters' hash
            number = int(line["iteration"])
            self.losses[number] = float(line["lm loss"])
            self.norms[number] = float(line["grad norm"] or math.nan)
            if number > untimed:
                self.steps.setdefault(number, []).append(1e3 * float(line["seconds"]))
                self.rates.append(float(line["tokens/s"]))
        for allocated, reserved in _MEMORY.findall(log):
            self.allocated = max(self.allocated, float(allocated) * 2**20)
            self.reserved = max(self.reserved, float(reserved) * 2**20)

    def over(self, other: Found) -> float:
        """Time over another arm's: the median ratio of the iterations that both have, which
        have the same sequences; NaN where there are none.
        """
        ratios = [
            statistics.median(self.steps[i]) / statistics.median(other.steps[i])
            for i in self.steps.keys() & other.steps.keys()
        ]
        return statistics.median(ratios) if ratios else math.nan


def largest_difference(own: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest relative difference of two arms' values by iteration."""
    return max((abs(own[i] / other[i] - 1) for i in own.keys() & other.keys()), default=math.nan)


def drawn(args: Any) -> list[int]:
    """Tokens of each sequence of the data set, batch by batch. The trainer shuffles all of them:
    with one batch every step has the same sequences.
    """
    rng = random.Random(args.seed)
    found, num_long = [], max(1, args.sequences // _SHARE) if args.lengths == "long" else 0
    for number in range(args.batches * args.sequences):
        if number % args.sequences < num_long:
            found.append(rng.randint(args.longest // 4, args.longest))
        else:
            found.append(min(args.longest, max(2, round(sft(rng) * args.median / 1000))))
    return found


def write_data(prefix: Path, lengths: Sequence[int], args: Any) -> None:
    """Write random tokens as a data set; the last token of each document is a label alone."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = numpy.random.default_rng(args.seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for length in lengths:
        tokens = rng.integers(0, args.vocabulary - 1, length + 1)
        builder.add_document(torch.from_numpy(tokens), [length + 1])
    builder.finalize(f"{prefix}.idx")


def words(args: Any, name: str, prefix: Path, run_dir: Path) -> list[str]:
    """The words of ``train`` for an arm."""
    common = (
        f"--mode 3d {'--procs' if args.small else '--gpus'} {args.ranks} --tp 1 --model llama3-8b "
        f"--num-layers {args.layers} --hidden-size {args.hidden} --ffn-hidden-size {args.ffn} "
        f"--num-attention-heads {args.heads} --num-query-groups {args.groups} "
        f"--kv-channels {args.hidden // args.heads} --seq-length {args.longest} "
        f"--max-position-embeddings {args.longest} --attention-dropout 0 --hidden-dropout 0 "
        f"--variable-length --overlong error --data {prefix} --split 1,0,0 --eval-iters 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {args.vocabulary - 1} "
        f"--padded-vocab-size {args.vocabulary} --micro-batch-size 1 "
        f"--global-batch-size {args.sequences} --max-steps {args.steps} --lr {args.lr} "
        f"--min-lr 0 --seed {args.seed} --log-interval 1 --log-memory-interval 1 "
        f"--num-workers 1 --memory {_ANY_MEMORY} --run-dir {run_dir}"
    )
    layers = [] if args.small else _layers(args.layers_of)
    return [*common.split(), *layers, *ARMS[name].words(args), *args.more.split()]


def _layers(implementation: str) -> list[str]:
    return ["--transformer-impl", implementation]


def run(args: Any, name: str, prefix: Path, found: Found) -> None:
    """Run an arm once and add what it measured. A failure is kept in ``found.failed``."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpp-arm-") as folder:
        log, run_dir = Path(folder) / "log", Path(folder) / "run"
        command = [sys.executable, "-m", "megatron.dpp", "train"]
        command += words(args, name, prefix, run_dir)
        path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        environment |= {"OMP_NUM_THREADS": "1"} if args.small else {}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=bound_to_this(),
            )  # fmt: skip
            try:
                status = process.wait(args.seconds)
                failed = f"exit status {status}" if status else ""
            except subprocess.TimeoutExpired:
                failed = f"not done within {args.seconds:g} s"
            finally:
                _end(process)
        said = log.read_text(encoding="utf-8", errors="replace")
        metrics = run_dir / "metrics.jsonl"
        text = metrics.read_text(encoding="utf-8") if metrics.is_file() else ""
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        found.add([json.loads(line) for line in whole], said, args.untimed)
        found.seconds.append(time.monotonic() - start)
        if not failed and not found.times:
            failed = "its metrics have no timed step"
        if failed:
            end = [line for line in said.splitlines() if line.strip()][-_END:]
            found.failed = "\n".join([failed, *end])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that may still run, and all its processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


HEADINGS = (
    "arm | ms (least..greatest, steps) | / first | simulated | tokens/s | allocated GB | "
    "reserved GB | / first | tokens held, simulated | last loss | off by | gradients off by | "
    "s of a command"
)


def row(name: str, found: Mapping[str, Found]) -> list[object]:
    """An arm's row of the table. ``first`` is the first arm that ran. Losses and norms of gradients
    are compared with those of the first one that has the same parameters, which are drawn for each
    chunk.
    """
    one, times = found[name], found[name].times
    if not times:
        return [f"{name}, failed", *["-"] * HEADINGS.count("|")]
    ran = {it: each for it, each in found.items() if each.times}
    first = next(iter(ran.values()))
    alike = next(each for it, each in ran.items() if ARMS[it].chunks == ARMS[name].chunks)
    return [
        f"{name}, failed" if one.failed else name,
        f"{statistics.median(times):.1f} ({min(times):.1f}..{max(times):.1f}, {len(times)})",
        _text(one.over(first)), _text(one.simulated / first.simulated),
        f"{statistics.median(one.rates):,.0f}", _text(one.allocated / 1e9, 2),
        _text(one.reserved / 1e9, 2), _text(one.reserved / (first.reserved or math.inf)),
        "-" if math.isnan(one.held) else f"{one.held:,.0f}", f"{one.losses[max(one.losses)]:.6f}",
        f"{largest_difference(one.losses, alike.losses):.1e}",
        f"{largest_difference(one.norms, alike.norms):.1e}",
        f"{statistics.median(one.seconds):.0f}",
    ]  # fmt: skip


def _text(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if value > 0 else "-"  # not a number without a measurement


def measure(args: Any) -> dict[str, Found]:
    """Run all arms in turns; each prints a line when it has run, and is written to ``--json``."""
    lengths = drawn(args)
    found = {name: Found() for name in args.arms}
    for name in args.arms:
        one, batch = found[name], lengths[: args.sequences]
        one.simulated, one.held = ARMS[name].simulated(args, batch)
    print(
        f"{args.sequences} sequences of a step, {sum(lengths) // args.batches} tokens, longest "
        f"{max(lengths)}; {args.layers} layers, hidden {args.hidden}, {args.ranks} ranks, slices "
        f"of {args.slice_tokens} tokens\n\n{HEADINGS}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="dpp-lengths-") as folder:
        prefix = Path(folder) / "sequences"
        write_data(prefix, lengths, args)
        for turn in range(args.runs):
            for name, one in found.items():
                if one.failed:
                    continue
                run(args, name, prefix, one)
                print(f"turn {turn + 1}: {' | '.join(map(str, row(name, found)))}", flush=True)
                if one.failed:
                    print(one.failed, flush=True)
                arms = {each: vars(it) for each, it in found.items()}
                facts = {"settings": vars(args), "lengths": lengths, "arms": arms}
                harness.write_json(args.json, facts)
    return found


def parse_arguments() -> Any:
    """The command line, checked."""
    parser = harness.new_parser(
        __doc__, ranks=(2, "pipeline size"), layers=4, hidden=4096, heads=32,
        groups=(8, "query groups"), ffn=(14336, "feed-forward size"), vocabulary=8192,
        lengths=("long", "sft: lognormal; long: a tenth is longest/4 to longest tokens"),
        longest=(65536, "most tokens of a sequence"), median=(1000.0, "tokens, of the lognormal"),
        sequences=(32, "of a step"),
        batches=(1, "of the data set; with 1, all steps have the same sequences"),
        slice_tokens=(4096, "of arms with slices"), steps=(6, "of a command"),
        untimed=(2, "first steps, which are not timed"), runs=(1, "turns of all arms"),
        arms=(",".join(name for name in ARMS if not name.startswith("megatron")),
              f"of {', '.join(ARMS)}"),
        layers_of=(LAYERS[0], f"whose layers: {', '.join(LAYERS)}"), lr=1e-9,
        seed=(7, "of lengths; 7 is near the mean of 12 seeds in simulated times"),
        seconds=(120.0, "most seconds of a command"), more=("", "further words of train"),
        json=("", "file for the results"), small=(False, "processes and tiny sizes, for a CPU"),
    )  # fmt: skip
    if "--small" in sys.argv:
        parser.set_defaults(**SMALL)
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    for flag, given, known in (
        ("arms", args.arms, ARMS), ("lengths", [args.lengths], LENGTHS),
        ("layers-of", [args.layers_of], LAYERS),
    ):  # fmt: skip
        for name in given:
            if name not in known:
                parser.error(f"--{flag} {name}: expected one of {', '.join(known)}")
    stages = args.ranks * max(ARMS[name].chunks for name in args.arms)
    if args.ranks < 2 or args.layers % max(stages, 1):
        parser.error(
            f"--ranks {args.ranks} --layers {args.layers}: expected 2 ranks or more, and a "
            f"multiple of {stages} layers"
        )
    if not 0 <= args.untimed < args.steps:
        parser.error(f"--untimed {args.untimed}: must be below --steps {args.steps}")
    for flag in ("sequences", "batches", "runs", "seconds", "median"):
        if not getattr(args, flag) > 0:
            parser.error(f"--{flag} {getattr(args, flag)}: must be above 0")
    if args.longest < 8 or args.slice_tokens < 1:
        parser.error(
            f"--longest {args.longest} --slice-tokens {args.slice_tokens}: expected 8 or more, and "
            "1 or more"
        )
    return args


def main() -> int:
    """Measure and print the table; 1 if an arm failed, or losses do not agree."""
    args = parse_arguments()
    with exits_on_sigterm():
        found = measure(args)
    print()
    harness.print_table(HEADINGS, (row(name, found) for name in found))
    print(
        "\nsimulated: time over the first arm's; most tokens that a rank holds through its layers, "
        "a cut sequence's keys counted as 0.35 of them"
    )
    losses = [one.losses for one in found.values() if one.losses]
    apart = [
        n
        for n, one in found.items()
        if losses and largest_difference(one.losses, losses[0]) > _AGREE
    ]
    if apart:
        print(f"losses differ from those of the first arm: {', '.join(apart)}")
    return int(bool(apart) or any(one.failed for one in found.values()))


if __name__ == "__main__":
    exit_with(main)
