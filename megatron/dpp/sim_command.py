"""``megatron-dpp sim``: simulate, compare and draw schedules.

megatron-dpp sim --pp 4 --chunks 2 --microbatches 8
megatron-dpp sim --pp 8 --chunks 2 --microbatches 32 --jitter 0.3 --compare --seeds 10
megatron-dpp sim --pp 4 --microbatches 16 --lengths packed --compare --climb 200 --seeds 10
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.dpp.command_line import guarded, new_parser, renamed
from megatron.dpp.config import Backward
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.files.index_files import check_index, read_lengths
from megatron.dpp.files.safe_files import read_bytes
from megatron.dpp.report.pictures.plots import draw
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.schedule.policies import BUILT_IN
from megatron.dpp.sim import arms, conditions
from megatron.dpp.sim.conditions import CONDITIONS, Change, chain, condition_costs, uniform
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts, Microbatch, parse_lengths
from megatron.dpp.sim.orders import best_order, in_order, simulated
from megatron.dpp.sim.result import Result, format_grid
from megatron.dpp.sim.schedules import STATIC, ScheduleConfig, run_static

_GRID_COLUMNS = 260
"""Wider grids are not printed unless asked for: they would wrap."""
_MOST_TASKS, _MOST_SIGMA = 1 << 20, 5.0
"""With a larger sigma a single task dominates a run."""

_Run = Callable[[Shape, Costs], Result]

_NAMES = {"activation_cap": "--cap", "policy": "--policy"}
"""Settings whose flags have other names here than in training."""


# Flags


def _from(least: float, most: float, kind: type = float) -> Callable[[str], float]:
    """A type of flags: a number in a range."""

    def number(text: str) -> float:
        value: float = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least:g} to {most:g}")
        return value

    return number


def _like(example: str) -> Callable[[str], list[float]]:
    """A type of flags: numbers in the form of an example, as ``1:1.5``."""
    form = re.sub(r"[0-9]+(\\\.[0-9]+)?", lambda _: r"(\d+\.?\d*)", re.escape(example))

    def numbers(text: str) -> list[float]:
        match = re.fullmatch(form, text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text}: expected a value like {example}")
        return [float(group) for group in match.groups()]

    return numbers


def _backward_word(text: str) -> Backward | None:
    try:
        return Backward.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = new_parser(prog, "Simulate pipeline schedules. Unit of time: a rank's F.")
    count, time = _from(1, 4096, int), _from(0, 1e6)
    add = parser.add_argument
    add("--pp", type=count, default=4, metavar="P", help="pipeline ranks (default 4)")
    add("--chunks", type=count, default=2, metavar="V", help="model chunks per rank (default 2)")
    add("--microbatches", type=_from(1, _MOST_TASKS, int), metavar="M",
        help="default 8, or a list's")  # fmt: skip
    add("--grid", action=argparse.BooleanOptionalAction, help="print the grid (default: if narrow)")
    add("--svg", metavar="FILE", help="draw the first seed as SVG")
    add = parser.add_argument_group("schedule").add_argument
    names = ", ".join((*BUILT_IN, *STATIC))
    text = f"{names}, or module:function; repeatable; default dynamic"
    add("--policy", action="append", metavar="NAME", help=text)
    add("--compare", action="store_true", help="add other schedules, and what comes from what")
    add("--climb", type=_from(0, 1_000_000, int), default=0, metavar="N",
        help="with --lengths: steps to better orders")  # fmt: skip
    add("--cap", default="auto", metavar="C", help="as --dpp-activation-cap (default auto)")
    text = "W apart from B: auto, on, off, stock:N"
    add("--split-backward", type=_backward_word, metavar="WORD", help=text)
    add("--w-pieces", type=count, default=1, metavar="N", help="pieces of a chunk's W (default 1)")
    add = parser.add_argument_group("costs and what varies, applied in this order").add_argument
    add("--condition", choices=list(CONDITIONS), metavar="NAME", help=", ".join(CONDITIONS))
    add("--overhead", type=time, metavar="T", help="host time after a task (0 chunk forwards)")
    add("--hop", type=time, default=0.01, metavar="T", help="time of a hop (0.01 chunk forwards)")
    add("--head", type=time, metavar="T", help="add T to the last stage's F, B and W")
    text = "lognormal factor per task"
    add("--jitter", type=_from(0, _MOST_SIGMA), metavar="SIGMA", help=text)
    text = f"{', '.join(MIXES)}, LIST, FILE, or SIGMA of times"
    add("--lengths", metavar="WHAT", help=text)
    add("--longest", type=int, metavar="TOKENS", help="unit of --cap (default: of --lengths)")
    add("--slow-rank", type=_like("1:1.5"), metavar="RANK:FACTOR", help="as in 1:1.5")
    text = "as in 0-1:2, in chunk forwards"
    add("--slow-link", type=_like("0-1:2"), metavar="A-B:TIME", help=text)
    text = "slow ranks now and then, as 2x:20%%"
    add("--transient", type=_like("2x:20%"), metavar="FACTORx:SHARE%", help=text)
    add("--seed", type=int, default=0, metavar="N", help="first seed (default 0)")
    text = "seeds to average over (default 1)"
    add("--seeds", type=_from(1, 10_000, int), default=1, metavar="N", help=text)
    return parser


@dataclass(frozen=True)
class _Lengths:
    """The meaning of ``--lengths``: a sigma, or a source of microbatches.

    Args:
        sigma: of a lognormal factor on each microbatch's times; sizes stay equal.
        source: gives the microbatches of a seed: their number -> the lengths of each one's
            sequences.
        longest: tokens of the longest microbatch, in whose activations the cap is given.
        count: of a list; 0 for a distribution.
    """

    sigma: float | None = None
    source: Callable[[int, int], list[Microbatch]] | None = None
    longest: int = 0
    count: int = 0

    @classmethod
    def parse(cls, text: str | None, longest: int | None) -> _Lengths:
        """Reads the flag.

        Raises:
            ConfigError: it is none of the forms.
        """
        if text is None:
            return cls()
        if text in MIXES:
            mix = MIXES[text]
            draw = mix.draw
            return cls(
                None, lambda s, n: draw(random.Random(f"lengths {s}"), n), longest or mix.longest
            )
        if re.fullmatch(r"[0-9]*\.?[0-9]+", text):
            require(float(text) <= _MOST_SIGMA,
                    f"--lengths {text}: a sigma must be from 0 to {_MOST_SIGMA:g}")  # fmt: skip
            return cls(float(text))
        documents = text.endswith((".idx", ".bin"))
        given = _documents(text[:-4], longest) if documents else parse_lengths(_list(text))
        median, most = statistics.median_high(given), max(given)
        print(f"{len(given)} sequences, {sum(given)} tokens; median {median}, longest {most}")

        def take(seed: int, number: int) -> list[Microbatch]:
            if documents:  # at random, as training draws them
                rng = random.Random(f"lengths {seed}")
                return [(rng.choice(given),) for _ in range(number)]
            return [(given[(seed * number + i) % len(given)],) for i in range(number)]

        return cls(None, take, longest or most, 0 if documents else len(given))

    def drawn(self, shape: Shape, seed: int) -> tuple[Shape, list[tuple[int, int]]]:
        """``shape`` with the sizes of one seed, and the tokens and squared lengths of each
        microbatch; nothing where they are equal.

        Raises:
            ConfigError: a microbatch is larger than ``--longest``.
        """
        if self.source is None:
            return shape, []
        rows = self.source(seed, shape.num_microbatches)
        sizes = tuple(map(sum, rows))
        if max(sizes) > self.longest:
            raise ConfigError(f"--longest {self.longest}: a microbatch has {max(sizes)} tokens")
        works = [(sum(row), sum(length * length for length in row)) for row in rows]
        return dataclasses.replace(shape, sizes=sizes, largest=self.longest), works


def _documents(prefix: str, longest: int | None) -> list[int]:
    """Lengths of the documents of token files, cut to ``longest``."""
    check_index(prefix)
    return [min(max(1, int(length) - 1), longest or int(length)) for length in read_lengths(prefix)]


def _list(text: str) -> str:
    """A list of lengths, or the content of the file that has it."""
    try:
        return text if "," in text else read_bytes(text).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lengths {text}: expected {', '.join(MIXES)}, SIGMA, lengths like 1000,8000, or a "
            f"file of them: {error}"
        ) from error


def _changes(args: argparse.Namespace, shape: Shape, sigma: float | None) -> list[Change]:
    """The changes that flags ask for, in their order; ConfigError for a rank or link that there is
    not.
    """
    found: list[Change] = []
    for value, change in (
        (args.overhead or None, conditions.overhead),
        (args.head, conditions.heavy_head),
        (args.jitter, conditions.jitter),
        (sigma, conditions.lengths),
    ):
        found += [change(value)] if value is not None else []
    last = shape.num_ranks - 1
    if args.slow_rank:
        rank, factor = args.slow_rank
        is_one = rank in range(last + 1) and factor > 0
        require(is_one, f"--slow-rank: expected a rank of 0 .. {last}, and a factor above 0")
        found.append(conditions.slow_rank(factor, int(rank)))
    if args.slow_link:
        a, b, hop = args.slow_link
        wraps = shape.num_chunks > 1 and (a, b) == (last, 0)  # to the next chunk of the first rank
        neighbours = wraps or (a in range(last) and b == a + 1)
        require(neighbours, f"--slow-link: {a:g} and {b:g} are not neighbours")
        found.append(conditions.slow_link(chunk_forwards=hop, rank=int(a)))
    if args.transient:
        factor, share = args.transient
        require(0 < share < 100 and factor > 0, "--transient: expected a share from 0 to 100 %")
        found.append(conditions.transient_all(factor, share / 100))
    return found


# Runs


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp sim") -> int:
    """Run the command; returns 2 for options that cannot be, 1 after another error."""
    args = build_parser(prog).parse_args(argv)
    return guarded(prog, lambda: _run(args), naming=renamed(_NAMES))


def _run(args: argparse.Namespace) -> int:
    lengths = _Lengths.parse(args.lengths, args.longest)
    number = args.microbatches or lengths.count or 8
    shape = Shape(args.pp, args.chunks, number)
    tasks = shape.num_stages * number
    require(tasks <= _MOST_TASKS, f"{tasks:,} forwards; at most {_MOST_TASKS:,} are simulated")
    if args.condition and lengths.source:
        raise ConfigError("--condition and --lengths of tokens: give one of them")
    if parse_cap(args.cap, Geometry(shape.num_ranks, 0, shape.num_chunks, number)).needs_measuring:
        raise ConfigError(f"--cap {args.cap}: expected no bytes; an activation's size is not known")
    args.backward = args.split_backward or Backward()  # auto splits them
    change = chain(*_changes(args, shape, lengths.sigma))
    runs = _runs(args, shape, unlike=lengths.source is not None)
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for seed in range(args.seed, args.seed + args.seeds):
        drawn, works = lengths.drawn(shape, seed)
        costs = change(_base(args, drawn, works, seed), drawn, random.Random(f"change {seed}"))
        for name, run in runs.items():
            results[name].append(run(drawn, costs))
    _print_results(dataclasses.replace(shape, largest=lengths.longest), results)
    if args.compare:
        _print_parts(arms.Arms(shape.num_chunks, _config(args)), results)
    _show(args, results)
    return 0


def _base(args: argparse.Namespace, shape: Shape, works: list[tuple[int, int]], seed: int) -> Costs:
    if args.condition:
        return condition_costs(args.condition, shape, seed)
    if works:
        costs = LengthCosts.transformer()
        return costs.of_works(works, shape.num_ranks, shape.num_chunks, args.hop)
    return uniform(shape, args.hop)


def _runs(args: argparse.Namespace, shape: Shape, *, unlike: bool) -> dict[str, _Run]:
    """The simulated schedules by name, those of ``--policy`` last."""
    asked = {name: _runner(name, args) for name in args.policy or ["dynamic"]}
    if not args.compare:
        return asked
    chosen = arms.Arms(shape.num_chunks, _config(args))
    runs: dict[str, _Run] = {name: partial(chosen.run, name) for name in chosen.names}
    for name in STATIC:
        if name != "interleaved" or shape.num_chunks > 1:
            runs.setdefault(name, _runner(name, args))
    if unlike:
        names = [chosen.static, *([arms.MEGATRON_W] if args.backward.split else []), arms.DYNAMIC]
        for name in names:
            run = runs.get(name) or asked[name]
            runs[f"{name}, best order"] = partial(_in_best_order, run, args.climb)
    return runs | asked


def _in_best_order(run: _Run, climb: int, shape: Shape, costs: Costs) -> Result:
    plan = best_order(shape, costs, simulated(run, shape, costs), simulations=climb)
    return run(*in_order(plan.order, shape, costs))


def _runner(name: str, args: argparse.Namespace) -> _Run:
    if name in STATIC:
        return partial(run_static, name)
    return dataclasses.replace(_config(args), policy=name).run


def _config(args: argparse.Namespace) -> ScheduleConfig:
    return ScheduleConfig(
        cap=args.cap,
        split_backward=args.backward.split,
        stock=args.backward.stock,
        w_pieces=args.w_pieces,
    )


# Text


def _mean(runs: Sequence[Result]) -> float:
    return statistics.fmean(run.makespan for run in runs)


def _print_results(shape: Shape, results: Mapping[str, Sequence[Result]]) -> None:
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
        print(f"{name:32s} {_mean(runs):9.4g}  {ratio:7.3f} {max(peaks):6.3g}  {shown}")
    of = " of the longest microbatch" if shape.largest else ""
    print(f"ratio: makespan / the busiest rank's own work; peak: whole ranks' activations{of} held")


def _print_parts(chosen: arms.Arms, results: Mapping[str, Sequence[Result]]) -> None:
    """Print which ingredient saves what, and each arm's peak in whole ranks' activations."""
    found = arms.parts({name: _mean(results[name]) for name in chosen.names}, chosen.steps)
    names = arms.part_names(found.values())
    heads = "".join(f"{name:>9s}" for name in ("peak", *names, "all"))
    print(f"\n{'what comes from what, %':24s}{heads}")
    for name in chosen.names:
        peak = statistics.fmean(max(run.peak_held) / chosen.num_chunks for run in results[name])
        cells = "".join(f"{cell:>9s}" for cell in arms.part_cells(found.get(name), names))
        print(f"{name:24s}{peak:9.3g}{cells}")
    print(
        f"per cent of the time of {chosen.static} that each ingredient saves; order: at the cap "
        "static; memory: beyond it, with --cap; links are alike in all rows"
    )


def _show(args: argparse.Namespace, results: dict[str, list[Result]]) -> None:
    """Print grids, and draw."""
    for name, runs in results.items():
        grid = format_grid(runs[0].slots)
        narrow = max(map(len, grid.splitlines())) <= _GRID_COLUMNS
        if args.grid or (args.grid is None and narrow and name in (args.policy or ["dynamic"])):
            print(f"\n{name}\n{grid}")
    if args.svg:
        try:
            draw({name: runs[0] for name, runs in results.items()}).write(Path(args.svg))
        except OSError as error:
            raise ConfigError(f"--svg {args.svg}: {error.strerror}") from error
        print(f"drawn: {args.svg}")
