"""``megatron-dpp sim``: simulate, compare and draw schedules.

    megatron-dpp sim --pp 4 --chunks 2 --microbatches 8
    megatron-dpp sim --pp 8 --chunks 2 --microbatches 32 --jitter 0.3 --compare --seeds 10
    megatron-dpp sim --pp 4 --microbatches 32 --lengths sft --compare --seeds 10
    megatron-dpp sim --costs costs.json --microbatches 32 --compare --svg step.svg
    megatron-dpp sim --pp 4 --lengths long --slices auto --seeds 4

``sim/measured.py`` describes cost files.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.dpp.command_line import guarded
from megatron.dpp.config import Backward
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.index_files import check_index, read_lengths
from megatron.dpp.naming import renamed
from megatron.dpp.report.pictures.schedules import draw
from megatron.dpp.safe_files import read_bytes
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.sim import arms, conditions
from megatron.dpp.sim.conditions import Change, chain, condition_costs, uniform
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts, histogram, parse_lengths
from megatron.dpp.sim.measured import MeasuredCosts, load_costs
from megatron.dpp.sim.packing import orders
from megatron.dpp.sim.result import Result, format_grid
from megatron.dpp.sim.schedules import STATIC, find_schedule, run_static
from megatron.dpp.sim.slice_arms import Comparison, table
from megatron.dpp.sim.slices import check_slice_tokens
from megatron.dpp.sim.tables import print_parts, print_results
from megatron.dpp.sim_flags import (
    MOST_SIGMA,
    check_numbers,
    check_used,
    check_with_slices,
    read_flags,
)
from megatron.dpp.slice_sizes import MOST_TOKENS

_MOST_TASKS = 1 << 20
_GRID_COLUMNS = 260
"""Wider grids are not printed unless asked for: they would wrap."""

_LEAST_SHOWN = 16
"""Lengths from which a histogram is printed."""

_BATCH = 64
"""Sequences of a batch with --slices, unless there are fewer or --microbatches says otherwise."""

_Run = Callable[[Shape, Costs], Result]

_NAMES = {
    "activation_cap": "--cap",
    "policy": "--policy",
}
"""Settings whose flags have other names here than in training."""


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp sim") -> int:
    """Run the command; returns 2 for options that cannot be, 1 after another error."""
    args = read_flags(argv, prog)
    return guarded(prog, lambda: _simulate(args), naming=renamed(_NAMES))


def _simulate(args: argparse.Namespace) -> int:
    _run(args)
    return 0


def _run(args: argparse.Namespace) -> None:
    measured = load_costs(args.costs) if args.costs else None
    lengths = _Lengths.parse(args.lengths, args.longest)
    if args.slices is not None:
        _compare_slices(args, lengths)
        return
    if args.microbatches is None:
        args.microbatches = lengths.count or 8
    if measured is None:
        shape = Shape(args.pp, args.chunks, args.microbatches)
    else:
        shape = measured.shape(args.microbatches)
    _check(args, shape, measured)
    unlike = lengths.source is not None
    args.backward = _backward(args, measured, unlike=unlike)
    check_used(
        args, measured, unlike=unlike, split=args.backward.split, num_chunks=shape.num_chunks
    )
    if lengths.source and (measured or args.condition):
        raise ConfigError(
            f"--lengths {args.lengths}: --costs and --condition have costs of their own; give "
            "SIGMA, or leave them out"
        )
    change = chain(*_changes(args, shape, lengths.sigma))
    names = args.policy or ["dynamic"]
    runs = {name: _runner(name, args) for name in names}
    if args.compare:
        runs = _comparison(args, shape, measured) | runs
        if lengths.source:
            runs["dynamic, cap by count"] = _by_count(_runner("dynamic", args))
            static = "interleaved" if shape.num_chunks > 1 else "1f1b"
            for name in (static, "dynamic"):
                runs[f"{name}, best order"] = _in_best_order(_runner(name, args))
    unit = "s" if measured else ""
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for seed in range(args.seed, args.seed + args.seeds):
        drawn = lengths.shape(shape, seed)
        base = _base(args, drawn, measured, seed)
        costs = change(base, drawn, random.Random(f"change {seed}"))
        for name, run in runs.items():
            results[name].append(run(drawn, costs))
    print_results(dataclasses.replace(shape, largest=lengths.longest), results, unit)
    if args.compare:
        print_parts(_arms(args, shape), results, shape.num_chunks)
    _show(args, results, unit)


def _compare_slices(args: argparse.Namespace, lengths: _Lengths) -> None:
    """Print the arms of cut and uncut batches."""
    check_with_slices(args, unlike=lengths.source is not None, drawn=lengths.drawn)
    assert lengths.source is not None
    tokens = None if args.slices == "auto" else _positive("--slices", args.slices)
    check_slice_tokens(tokens or MOST_TOKENS)
    comparison = Comparison(
        num_ranks=args.pp, num_chunks=args.chunks, tokens=tokens, overhead=args.overhead,
        hop=args.hop if "hop" in args.given else None, head=args.head or 0.0,
    )  # fmt: skip
    number = args.microbatches or min(lengths.count or _BATCH, _BATCH)
    seeds = range(args.seed, args.seed + args.seeds)
    _check_counts(args, args.pp, args.chunks, number)
    print("\n".join(table(comparison, [lengths.source(seed, number) for seed in seeds])))


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text}: expected a number of tokens, or auto")
    return int(text)


@dataclass(frozen=True)
class _Lengths:
    """The meaning of ``--lengths``: a sigma, or a source of lengths in tokens (``source(seed,
    number)``).

    Args:
        sigma: of a lognormal factor on each microbatch's times; sizes stay equal.
        longest: tokens of the longest sequence, in whose activations the cap is given.
        count: of a list; 0 for a distribution.
        drawn: from documents, which are cut at ``longest``.
    """

    sigma: float | None = None
    source: Callable[[int, int], Sequence[int]] | None = None
    longest: int = 0
    count: int = 0
    drawn: bool = False

    @classmethod
    def parse(cls, text: str | None, longest: int | None) -> _Lengths:
        if text is None:
            return cls()
        if text in MIXES:
            mix = MIXES[text]

            def draw(seed: int, number: int) -> Sequence[int]:
                rng = random.Random(f"lengths {seed}")
                return [mix.draw(rng) for _ in range(number)]

            return cls(None, draw, longest or mix.longest)
        if (sigma := _number(text)) is not None:
            if not 0 <= sigma <= MOST_SIGMA:
                raise ConfigError(
                    f"--lengths {text}: a sigma must be a number from 0 to {MOST_SIGMA:g}"
                )
            return cls(sigma)
        if text.endswith((".idx", ".bin")):
            return cls._of_index(text[:-4], longest)
        given = parse_lengths(text if "," in text else _read(text))
        if len(given) >= _LEAST_SHOWN:
            print("\n".join(histogram(given)))

        def take(seed: int, number: int) -> Sequence[int]:
            return [given[(seed * number + i) % len(given)] for i in range(number)]

        return cls(None, take, longest or max(given), len(given))

    @classmethod
    def _of_index(cls, prefix: str, longest: int | None) -> _Lengths:
        """Documents of token files, drawn at random as training draws them."""
        check_index(prefix)
        given = [max(1, int(length) - 1) for length in read_lengths(prefix)]
        if longest:
            given = [min(length, longest) for length in given]
        print("\n".join(histogram(given)))

        def draw(seed: int, number: int) -> Sequence[int]:
            rng = random.Random(f"lengths {seed}")
            return [rng.choice(given) for _ in range(number)]

        return cls(None, draw, longest or max(given), drawn=True)

    def shape(self, shape: Shape, seed: int) -> Shape:
        """``shape`` with the sizes of one seed."""
        if self.source is None:
            return shape
        sizes = tuple(self.source(seed, shape.num_microbatches))
        if max(sizes) > self.longest:
            raise ConfigError(
                f"--longest {self.longest}: a microbatch has {max(sizes)} tokens; raise it"
            )
        return dataclasses.replace(shape, sizes=sizes, largest=self.longest)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: str) -> str:
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lengths {path}: expected sft, long, SIGMA, lengths like 1000,8000, or a file of "
            f"them: {error}"
        ) from error


def _check_counts(args: argparse.Namespace, *sizes: int) -> None:
    """Refuse ranks, chunks, microbatches or seeds below 1."""
    flags = ("--pp", "--chunks", "--microbatches", "--seeds")
    for flag, number in zip(flags, (*sizes, args.seeds), strict=True):
        require(number >= 1, f"{flag} {number}: must be at least 1")
    tasks = math.prod(sizes)
    given = " x ".join(f"{flag} {n}" for flag, n in zip(flags, sizes, strict=False))
    rule = f"are {tasks:,} forwards; at most {_MOST_TASKS:,} are simulated"
    require(tasks <= _MOST_TASKS, f"{given} {rule}")


def _check(args: argparse.Namespace, shape: Shape, measured: MeasuredCosts | None) -> None:
    _check_counts(args, shape.num_ranks, shape.num_chunks, shape.num_microbatches)
    require(args.w_pieces >= 1, f"--w-pieces {args.w_pieces}: must be at least 1")
    check_numbers(args)
    first = Geometry(shape.num_ranks, 0, shape.num_chunks, shape.num_microbatches)
    if parse_cap(args.cap, first).needs_measuring:
        raise ConfigError(
            f"--cap {args.cap}: bytes mean nothing to the simulator; give chunk activations as a "
            "multiple of the pipeline size like 1.5p, megatron or strict"
        )
    if measured and args.condition:
        raise ConfigError("--condition has costs of its own; with --costs use --jitter and so on")
    if measured and not measured.split and args.split_backward not in ("auto", "off"):
        raise ConfigError(
            f"--split-backward {args.split_backward}: {args.costs} has no W times (its run had a "
            "fused backward); take --split-backward off"
        )


def _backward(
    args: argparse.Namespace, measured: MeasuredCosts | None, *, unlike: bool
) -> Backward:
    """The way of backwards; ``auto`` chooses as a run does where it can."""
    given = Backward.of(args.split_backward)
    if given is not None:
        return given
    if measured and not measured.split:
        return Backward(split=False)
    return Backward(stock=1) if args.overhead and not unlike else Backward()


def _base(
    args: argparse.Namespace, shape: Shape, measured: MeasuredCosts | None, seed: int
) -> Costs:
    if measured:
        return measured.costs(shape.num_microbatches, random.Random(f"samples {seed}"))
    if args.condition:
        return condition_costs(args.condition, shape, seed)
    if shape.sizes:
        return LengthCosts.transformer().of(
            [[size] for size in shape.sizes],
            num_ranks=shape.num_ranks,
            num_chunks=shape.num_chunks,
            hop=args.hop,
        )
    return uniform(shape, args.hop)


def _changes(args: argparse.Namespace, shape: Shape, sigma: float | None) -> list[Change]:
    found: list[Change] = []
    if args.overhead:
        found.append(conditions.overhead(args.overhead))
    if args.head is not None:
        found.append(conditions.heavy_head(args.head))
    if args.jitter is not None:
        found.append(conditions.jitter(args.jitter))
    if sigma is not None:
        found.append(conditions.lengths(sigma))
    if args.slow_rank:
        found.append(_slow_rank(args.slow_rank, shape))
    if args.slow_link:
        found.append(_slow_link(args.slow_link, shape))
    if args.transient:
        factor, share = _numbers("--transient", args.transient, "{}x:{}%", "2x:20%")
        if not (0 < share < 100 and factor > 0):
            raise ConfigError(
                f"--transient {args.transient}: the factor must be above 0, and the share above 0 "
                "and below 100 %"
            )
        found.append(conditions.transient_all(factor, share / 100))
    return found


def _slow_rank(text: str, shape: Shape) -> Change:
    rank, factor = _numbers("--slow-rank", text, "#:{}", "1:1.5")
    if rank >= shape.num_ranks:
        raise ConfigError(f"--slow-rank {text}: there are ranks 0 .. {shape.num_ranks - 1}")
    if factor == 0:
        raise ConfigError(f"--slow-rank {text}: the factor must be above 0")
    return conditions.slow_rank(factor, int(rank))


def _slow_link(text: str, shape: Shape) -> Change:
    a, b, hop = _numbers("--slow-link", text, "#-#:{}", "0-1:2")
    last = shape.num_ranks - 1
    wraps = shape.num_chunks > 1 and (a, b) == (last, 0)  # on to the next chunk of the first rank
    if not (wraps or b == a + 1 <= last):
        raise ConfigError(
            f"--slow-link {text}: {a:g} and {b:g} are not neighbours: expected A-B with "
            f"B = A + 1, up to {last}" + (f", or {last}-0" if shape.num_chunks > 1 else "")
        )
    return conditions.slow_link(chunk_forwards=hop, rank=int(a))


def _numbers(flag: str, text: str, form: str, example: str) -> list[float]:
    pattern = form.replace("#", r"(\d+)").replace("{}", r"(\d+\.?\d*)")
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ConfigError(f"{flag} {text}: expected a value like {example}")
    return [float(group) for group in match.groups()]


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


def _by_count(run: _Run) -> _Run:
    """``run`` with a cap that counts microbatches, whatever their size."""
    return lambda shape, costs: run(dataclasses.replace(shape, sizes=()), costs)


def _in_best_order(run: _Run) -> _Run:
    """``run`` with the microbatches in the best of the planner's orders."""

    def best(shape: Shape, costs: Costs) -> Result:
        totals = [sum(row[0][i] for row in costs.durations) for i in range(shape.num_microbatches)]
        found = [
            run(
                dataclasses.replace(shape, sizes=tuple(shape.sizes[i] for i in order)),
                costs.permuted(order),
            )
            for order in orders(totals, shape.num_ranks).values()
        ]
        return min(found, key=lambda result: result.makespan)

    return best


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


def _comparison(
    args: argparse.Namespace, shape: Shape, measured: MeasuredCosts | None
) -> dict[str, _Run]:
    chosen = _arms(args, shape)
    runs: dict[str, _Run] = {name: partial(chosen.run, name) for name in chosen.names}
    names = [*STATIC, "earlier-dpp"]
    if measured and not measured.split:
        names.remove("zb-h1")
    if shape.num_chunks == 1:
        names.remove("interleaved")
    return runs | {name: _runner(name, args) for name in names if name not in runs}


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
