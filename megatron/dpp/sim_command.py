"""``megatron-dpp sim``: simulate, compare and draw schedules.

    megatron-dpp sim --pp 4 --chunks 2 --microbatches 8
    megatron-dpp sim --pp 8 --chunks 2 --microbatches 32 --jitter 0.3 --compare --seeds 10
    megatron-dpp sim --pp 4 --microbatches 16 --lengths packed --compare --climb 200 --seeds 10
    megatron-dpp sim --costs costs.json --microbatches 32 --compare --svg step.svg

``sim/measured.py`` describes cost files.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron.dpp.command_line import guarded, renamed
from megatron.dpp.config import Backward
from megatron.dpp.errors import ConfigError
from megatron.dpp.report.pictures.schedules import draw
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.sim import arms
from megatron.dpp.sim.conditions import chain, condition_costs, uniform
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.flags import Lengths, changes, check_ranges, check_shape, new_sim_parser
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.measured import MeasuredCosts, load_costs
from megatron.dpp.sim.orders import best_order, in_order, simulated
from megatron.dpp.sim.result import Result, format_grid
from megatron.dpp.sim.schedules import STATIC, find_schedule, run_static

_GRID_COLUMNS = 260
"""Wider grids are not printed unless asked for: they would wrap."""

_Run = Callable[[Shape, Costs], Result]

_NAMES = {
    "activation_cap": "--cap",
    "policy": "--policy",
}
"""Settings whose flags have other names here than in training."""


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp sim") -> int:
    """Run the command; returns 2 for options that cannot be, 1 after another error."""
    args = new_sim_parser(prog).parse_args(argv)
    return guarded(prog, lambda: _run(args), naming=renamed(_NAMES))


def _run(args: argparse.Namespace) -> int:
    check_ranges(args)
    measured = load_costs(args.costs) if args.costs else None
    lengths = Lengths.parse(args.lengths, args.longest)
    number = args.microbatches or lengths.count or 8
    shape = measured.shape(number) if measured else Shape(args.pp, args.chunks, number)
    check_shape(shape, args.group)
    if sum(map(bool, (measured, args.condition, lengths.source))) > 1:
        raise ConfigError("--costs, --condition and --lengths of tokens: give one of them")
    if parse_cap(args.cap, Geometry(shape.num_ranks, 0, shape.num_chunks, number)).needs_measuring:
        raise ConfigError(f"--cap {args.cap}: expected no bytes; an activation's size is not known")
    args.backward = _backward(args, measured)
    change = chain(*changes(args, shape, lengths.sigma))
    runs = _runs(args, shape, measured, unlike=lengths.source is not None)
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for seed in range(args.seed, args.seed + args.seeds):
        drawn, works = lengths.drawn(shape, seed)
        costs = change(
            _base(args, drawn, measured, works, seed), drawn, random.Random(f"change {seed}")
        )
        for name, run in runs.items():
            results[name].append(run(drawn, costs))
    unit = "s" if measured else ""
    _print_results(dataclasses.replace(shape, largest=lengths.longest), results, unit)
    if args.compare:
        _print_parts(_arms(args, shape), results, shape.num_chunks)
    _show(args, results, unit)
    return 0


def _backward(args: argparse.Namespace, measured: MeasuredCosts | None) -> Backward:
    """The way of backwards; ``auto`` splits them where it can."""
    given = Backward.of(args.split_backward)
    if measured and not measured.split:
        if given is not None and given.split:
            raise ConfigError(f"{args.costs} has no W times; take --split-backward off")
        return Backward(split=False)
    return given or Backward()


def _base(
    args: argparse.Namespace,
    shape: Shape,
    measured: MeasuredCosts | None,
    works: list[tuple[int, int]],
    seed: int,
) -> Costs:
    if measured:
        return measured.costs(shape.num_microbatches, random.Random(f"samples {seed}"))
    if args.condition:
        return condition_costs(args.condition, shape, seed)
    if works:
        costs = LengthCosts.transformer()
        return costs.of_works(works, shape.num_ranks, shape.num_chunks, args.hop)
    return uniform(shape, args.hop)


def _runs(
    args: argparse.Namespace, shape: Shape, measured: MeasuredCosts | None, *, unlike: bool
) -> dict[str, _Run]:
    """The simulated schedules by name, those of ``--policy`` last."""
    asked = {name: _runner(name, args) for name in args.policy or ["dynamic"]}
    if not args.compare:
        return asked
    chosen = _arms(args, shape)
    runs: dict[str, _Run] = {name: partial(chosen.run, name) for name in chosen.names}
    for name in (*STATIC, "earlier-dpp"):
        needs_weights = name == "zb-h1" and measured and not measured.split
        if not needs_weights and not (name == "interleaved" and shape.num_chunks == 1):
            runs.setdefault(name, _runner(name, args))
    if unlike:
        names = [chosen.static, *([arms.MEGATRON_W] if chosen.split else []), arms.DYNAMIC]
        for name in names:
            run = runs.get(name) or asked[name]
            runs[f"{name}, best order"] = partial(_in_best_order, run, args.climb)
    return runs | asked


def _in_best_order(run: _Run, climb: int, shape: Shape, costs: Costs) -> Result:
    plan = best_order(shape, costs, simulated(run, shape, costs), simulations=climb)
    return run(*in_order(plan.order, shape, costs))


def _runner(name: str, args: argparse.Namespace) -> _Run:
    if name in STATIC:
        return lambda shape, costs: run_static(name, shape, costs, beta=args.beta, group=args.group)
    schedule = find_schedule(
        name,
        cap=args.cap,
        split_backward=args.backward.split,
        stock=args.backward.stock,
        beta=args.beta,
        w_pieces=args.w_pieces,
        group=args.group,
    )
    return lambda shape, costs: schedule.run(shape, costs, lead=args.lead)


def _arms(args: argparse.Namespace, shape: Shape) -> arms.Arms:
    """The arms whose parts are printed."""
    return arms.Arms(
        shape.num_chunks,
        cap=args.cap,
        split=args.backward.split,
        stock=args.backward.stock,
        beta=args.beta,
        w_pieces=args.w_pieces,
        group=args.group,
        lead=args.lead,
    )


# Text


def _mean(runs: Sequence[Result]) -> float:
    return statistics.fmean(run.makespan for run in runs)


def _print_results(shape: Shape, results: Mapping[str, Sequence[Result]], unit: str) -> None:
    """Print a row per schedule."""
    seeds = max(map(len, results.values()), default=0)
    print(
        f"{shape.num_ranks} ranks x {shape.num_chunks} chunks, microbatches: "
        f"{shape.num_microbatches}, seeds: {seeds}"
    )
    print(f"{'schedule':32s} {'makespan':>10s} {'ratio':>7s} {'peak':>6s}  peak by rank")
    for name, runs in results.items():
        chunks = 1 + max(slot.action.chunk for slot in runs[0].slots[0])
        peaks = [held / chunks for held in runs[0].peak_held]
        shown = " ".join(f"{peak:.3g}" for peak in peaks[:16]) + (" ..." if peaks[16:] else "")
        ratio = statistics.fmean(run.ratio for run in runs)
        print(f"{name:32s} {_mean(runs):9.4g}{unit or ' '} {ratio:7.3f} {max(peaks):6.3g}  {shown}")
    of = " of the longest microbatch" if shape.largest else ""
    print(f"ratio: makespan / the busiest rank's own work; peak: whole ranks' activations{of} held")


def _print_parts(
    chosen: arms.Arms, results: Mapping[str, Sequence[Result]], num_chunks: int
) -> None:
    """Print which ingredient saves what, and each arm's peak in whole ranks' activations."""
    found = arms.parts({name: _mean(results[name]) for name in chosen.names}, chosen.steps)
    names = arms.part_names(found.values())
    heads = "".join(f"{name:>9s}" for name in ("peak", *names, "all"))
    print(f"\n{'what comes from what, %':24s}{heads}")
    for name in chosen.names:
        peak = statistics.fmean(max(run.peak_held) / num_chunks for run in results[name])
        cells = "".join(f"{cell:>9s}" for cell in arms.part_cells(found.get(name), names))
        print(f"{name:24s}{peak:9.3g}{cells}")
    print(
        f"per cent of the time of {chosen.static} that each ingredient saves; order: at the cap "
        "static; memory: beyond it, with --cap; links are alike in all rows"
    )


def _show(args: argparse.Namespace, results: dict[str, list[Result]], unit: str) -> None:
    """Print grids, and draw."""
    for name, runs in results.items():
        grid = format_grid(runs[0].slots)
        narrow = max(map(len, grid.splitlines())) <= _GRID_COLUMNS
        if args.grid or (args.grid is None and narrow and name in (args.policy or ["dynamic"])):
            print(f"\n{name}\n{grid}")
    if args.svg:
        try:
            draw({name: runs[0] for name, runs in results.items()}, unit).write(Path(args.svg))
        except OSError as error:
            raise ConfigError(f"--svg {args.svg}: {error.strerror}") from error
        print(f"drawn: {args.svg}")
