"""Flags of ``megatron-dpp sim``: their parser, and what they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.dpp.command_line import new_parser
from megatron.dpp.config import Backward
from megatron.dpp.errors import ConfigError
from megatron.dpp.files.index_files import check_index, read_lengths
from megatron.dpp.files.safe_files import read_bytes
from megatron.dpp.schedule.policies import BUILT_IN
from megatron.dpp.sim import conditions
from megatron.dpp.sim.conditions import CONDITIONS, Change
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import MIXES, Microbatch, parse_lengths
from megatron.dpp.sim.schedules import STATIC

_MOST_TASKS, _MOST_SIGMA = 1 << 20, 5.0
_RANGES = (
    *(("pp", 1, 4096), ("chunks", 1, 4096), ("microbatches", 1, _MOST_TASKS)),
    *(("seeds", 1, 10_000), ("w_pieces", 1, 4096), ("climb", 0, 1_000_000)),
    *(("lead", 0, 1e6), ("hop", 0, 1e6), ("overhead", 0, 1e6), ("head", 0, 1e6)),
    *(("jitter", 0, _MOST_SIGMA), ("beta", 0, 1)),
)
"""Flag, least and greatest value; with a larger sigma a single task dominates a run."""


def new_sim_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = new_parser(
        prog, "Simulate pipeline schedules. Unit of time: a rank's F; s with --costs."
    )
    add = parser.add_argument
    add("--pp", type=int, default=4, metavar="P", help="pipeline ranks (default 4)")
    add("--chunks", type=int, default=2, metavar="V", help="model chunks per rank (default 2)")
    add("--microbatches", type=int, metavar="M", help="default 8, or a list's")
    add("--group", type=int, metavar="N", help="microbatch group size (default: P)")
    add("--grid", action=argparse.BooleanOptionalAction, help="print the grid (default: if narrow)")
    add("--svg", metavar="FILE", help="draw the first seed as SVG")
    add = parser.add_argument_group("schedule").add_argument
    names = ", ".join((*BUILT_IN, "earlier-dpp", *STATIC))
    text = f"{names}, or module:function; repeatable; default dynamic"
    add("--policy", action="append", metavar="NAME", help=text)
    add("--compare", action="store_true", help="add other schedules, and what comes from what")
    add("--climb", type=int, default=0, metavar="N", help="with --lengths: steps to better orders")
    add("--cap", default="auto", metavar="C", help="as --dpp-activation-cap (default auto)")
    text = "W apart from B: auto, on, off, stock:N"
    add("--split-backward", type=_word, default="auto", metavar="WORD", help=text)
    add("--w-pieces", type=int, default=1, metavar="N", help="pieces of a chunk's W (default 1)")
    add("--beta", type=float, default=0.0, metavar="X", help="share that a B frees (default 0)")
    add("--lead", type=float, default=0.0, metavar="T", help="choose T before a task ends (0)")
    add = parser.add_argument_group("costs and what varies, applied in this order").add_argument
    add("--costs", metavar="FILE", help="measured costs; they set --pp and --chunks")
    add("--condition", choices=list(CONDITIONS), metavar="NAME", help=", ".join(CONDITIONS))
    add("--overhead", type=float, metavar="T", help="host time after a task (0 chunk forwards)")
    add("--hop", type=float, default=0.01, metavar="T", help="time of a hop (0.01 chunk forwards)")
    add("--head", type=float, metavar="T", help="add T to the last stage's F, B and W")
    add("--jitter", type=float, metavar="SIGMA", help="lognormal factor per task")
    text = f"{', '.join(MIXES)}, LIST, FILE, or SIGMA of times"
    add("--lengths", metavar="WHAT", help=text)
    add("--longest", type=int, metavar="TOKENS", help="unit of --cap (default: of --lengths)")
    add("--slow-rank", metavar="RANK:FACTOR", help="as in 1:1.5")
    add("--slow-link", metavar="A-B:TIME", help="as in 0-1:2, in chunk forwards")
    add("--transient", metavar="FACTORx:SHARE%", help="slow ranks now and then, as 2x:20%%")
    add("--seed", type=int, default=0, metavar="N", help="first seed (default 0)")
    add("--seeds", type=int, default=1, metavar="N", help="seeds to average over (default 1)")
    return parser


def _word(text: str) -> str:
    try:
        Backward.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return text


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers outside of their ranges (ConfigError)."""
    for name, least, most in _RANGES:
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            flag = f"--{name.replace('_', '-')} {value:g}"
            raise ConfigError(f"{flag}: must be from {least:g} to {most:g}")


def check_shape(shape: Shape, group: int | None) -> None:
    """Refuse more tasks than can be simulated, and groups that are too small (ConfigError)."""
    if group is not None and group < shape.num_ranks:
        raise ConfigError(f"--group {group}: must be at least --pp {shape.num_ranks}")
    tasks = shape.num_stages * shape.num_microbatches
    if tasks > _MOST_TASKS:
        raise ConfigError(
            f"--pp {shape.num_ranks} x --chunks {shape.num_chunks} x --microbatches "
            f"{shape.num_microbatches} are {tasks:,} forwards; at most {_MOST_TASKS:,} are "
            "simulated"
        )


@dataclass(frozen=True)
class Lengths:
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
    def parse(cls, text: str | None, longest: int | None) -> Lengths:
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
            if float(text) > _MOST_SIGMA:
                raise ConfigError(f"--lengths {text}: a sigma must be from 0 to {_MOST_SIGMA:g}")
            return cls(float(text))
        if text.endswith((".idx", ".bin")):
            return cls._of_index(text[:-4], longest)
        given = parse_lengths(text if "," in text else _read(text))
        _tell(given)

        def take(seed: int, number: int) -> list[Microbatch]:
            return [(given[(seed * number + i) % len(given)],) for i in range(number)]

        return cls(None, take, longest or max(given), len(given))

    @classmethod
    def _of_index(cls, prefix: str, longest: int | None) -> Lengths:
        """Documents of token files, drawn at random as training draws them."""
        check_index(prefix)
        given = [max(1, int(length) - 1) for length in read_lengths(prefix)]
        given = [min(length, longest) for length in given] if longest else given
        _tell(given)

        def draw(seed: int, number: int) -> list[Microbatch]:
            rng = random.Random(f"lengths {seed}")
            return [(rng.choice(given),) for _ in range(number)]

        return cls(None, draw, longest or max(given))

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


def _tell(lengths: Sequence[int]) -> None:
    middle, longest = statistics.median_high(lengths), max(lengths)
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens; median {middle}, longest {longest}")


def _read(path: str) -> str:
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lengths {path}: expected {', '.join(MIXES)}, SIGMA, lengths like 1000,8000, or a "
            f"file of them: {error}"
        ) from error


def changes(args: argparse.Namespace, shape: Shape, sigma: float | None) -> list[Change]:
    """The changes that flags ask for, in their order.

    Raises:
        ConfigError: a flag has another form, or names a rank or link that there is not.
    """
    found: list[Change] = []
    for value, change in (
        (args.overhead or None, conditions.overhead),
        (args.head, conditions.heavy_head),
        (args.jitter, conditions.jitter),
        (sigma, conditions.lengths),
    ):
        found += [change(value)] if value is not None else []
    if args.slow_rank:
        rank, factor = _numbers("--slow-rank", args.slow_rank, "#:{}", "1:1.5")
        if rank >= shape.num_ranks or not factor:
            last = shape.num_ranks - 1
            raise ConfigError(
                f"--slow-rank {args.slow_rank}: expected a rank of 0 .. {last}, x > 0"
            )
        found.append(conditions.slow_rank(factor, int(rank)))
    if args.slow_link:
        a, b, hop = _numbers("--slow-link", args.slow_link, "#-#:{}", "0-1:2")
        last = shape.num_ranks - 1
        wraps = shape.num_chunks > 1 and (a, b) == (last, 0)  # to the next chunk of the first rank
        if not (wraps or b == a + 1 <= last):
            raise ConfigError(f"--slow-link {args.slow_link}: {a:g} and {b:g} are not neighbours")
        found.append(conditions.slow_link(chunk_forwards=hop, rank=int(a)))
    if args.transient:
        factor, share = _numbers("--transient", args.transient, "{}x:{}%", "2x:20%")
        if not (0 < share < 100 and factor > 0):
            raise ConfigError(f"--transient {args.transient}: expected a share from 0 to 100 %")
        found.append(conditions.transient_all(factor, share / 100))
    return found


def _numbers(flag: str, text: str, form: str, example: str) -> Sequence[float]:
    pattern = form.replace("#", r"(\d+)").replace("{}", r"(\d+\.?\d*)")
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ConfigError(f"{flag} {text}: expected a value like {example}")
    return [float(group) for group in match.groups()]
