"""Flags of ``megatron-dpp sim``, and the refusal of those that would change nothing."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from megatron.dpp.command_line import new_parser
from megatron.dpp.config import Backward
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule.policies import BUILT_IN
from megatron.dpp.sim.conditions import CONDITIONS
from megatron.dpp.sim.measured import MeasuredCosts
from megatron.dpp.sim.schedules import STATIC

MOST_SIGMA = 5.0
_MOST = {"lead": 1e6, "hop": 1e6, "overhead": 1e6, "head": 1e6, "jitter": MOST_SIGMA}
"""Largest values; with a larger sigma a single task dominates a run."""

_WITH_SLICES = {
    *("pp", "chunks", "microbatches", "lengths", "slices", "seed", "seeds"),
    *("overhead", "hop", "head"),
}
_OF_SCHEDULES = ("group", "cap", "split_backward", "w_pieces", "beta", "lead")
_OF_STATIC = {
    "gpipe": (),
    "1f1b": (),
    "interleaved": ("group",),
    "zb-h1": ("beta",),
    "earlier-dpp": ("group", "lead"),
}
"""Flags of schedules that take not all of ``_OF_SCHEDULES``."""


def read_flags(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The parsed flags; ``given`` names those that the user wrote."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    bare = argparse.Namespace(**dict.fromkeys(vars(args)))  # which defaults do not replace
    found = vars(parser.parse_args(argv, bare))
    args.given = [name for name, value in found.items() if value is not None]
    return args


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Simulate pipeline schedules. Unit of time: a rank's F; s with --costs."
    parser = new_parser(prog, text)
    add = parser.add_argument
    add("--pp", type=int, default=4, metavar="P", help="pipeline ranks (default 4)")
    add("--chunks", type=int, default=2, metavar="V", help="model chunks per rank (default 2)")
    add("--microbatches", type=int, metavar="M", help="default 8, or a list's")
    add("--group", type=int, metavar="N", help="microbatch group size (default: P)")
    add("--grid", action=argparse.BooleanOptionalAction, help="print the grid (default: if narrow)")
    add("--svg", metavar="FILE", help="draw the first seed as SVG")
    _add_schedule_flags(parser)
    _add_cost_flags(parser)
    return parser


def _add_schedule_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("schedule").add_argument
    policies = (*BUILT_IN, "earlier-dpp")
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"{', '.join((*policies, *STATIC))}, or module:function; repeatable; default dynamic",
    )
    add("--compare", action="store_true", help="add other schedules, and what comes from what")
    add("--cap", default="auto", metavar="C", help="as --dpp-activation-cap (default auto)")
    add(
        "--split-backward",
        type=_word,
        default="auto",
        metavar="WORD",
        help="W apart from B: auto, on, off, stock:N",
    )
    add("--w-pieces", type=int, default=1, metavar="N", help="pieces of a chunk's W (default 1)")
    add("--beta", type=float, default=0.0, metavar="X", help="share that a B frees (default 0)")
    add("--lead", type=float, default=0.0, metavar="T", help="choose T before a task ends (0)")


def _add_cost_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("costs and what varies, applied in this order").add_argument
    add("--costs", metavar="FILE", help="measured costs; they set --pp and --chunks")
    add("--condition", choices=list(CONDITIONS), metavar="NAME", help=", ".join(CONDITIONS))
    add("--overhead", type=float, metavar="T", help="host time after a task (0 chunk forwards)")
    add("--hop", type=float, default=0.01, metavar="T", help="time of a hop (0.01 chunk forwards)")
    add("--head", type=float, metavar="T", help="add T to the last stage's F, B and W")
    add("--jitter", type=float, metavar="SIGMA", help="lognormal factor per task")
    add(
        "--lengths",
        metavar="WHAT",
        help="sft, long, LIST, FILE, or SIGMA of times",
    )
    add("--longest", type=int, metavar="TOKENS", help="unit of --cap (default: of --lengths)")
    add("--slices", metavar="N", help="cut sequences into N tokens, or auto")
    add("--slow-rank", metavar="RANK:FACTOR", help="as in 1:1.5")
    add("--slow-link", metavar="A-B:TIME", help="as in 0-1:2, in chunk forwards")
    add("--transient", metavar="FACTORx:SHARE%", help="slow ranks now and then, as 2x:20%%")
    add("--seed", type=int, default=0, metavar="N", help="first seed (default 0)")
    add("--seeds", type=int, default=1, metavar="N", help="seeds to average over (default 1)")


def _word(text: str) -> str:
    try:
        Backward.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return text


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse times and sigmas that are negative, too large or no numbers."""
    for flag, most in _MOST.items():
        value = getattr(args, flag)
        if value is not None and not 0 <= value <= most:
            raise ConfigError(f"--{flag} {value:g}: must be a number from 0 to {most:g}")


def check_with_slices(args: argparse.Namespace, *, unlike: bool, drawn: bool) -> None:
    """Refuse what the comparison of cut and uncut batches does not read.

    Args:
        unlike: ``--lengths`` gives sequences in tokens.
        drawn: ``--longest`` cuts the documents that are drawn.
    """
    what = f"--slices {args.slices}: it compares schedules of its own; "
    reads = (
        _WITH_SLICES | ({"longest"} if drawn else set()) | ({"grid"} if not args.grid else set())
    )
    _refuse(args, set(args.given) - reads, what + "leave out {}")
    if not unlike:
        raise ConfigError(f"{what}it needs --lengths sft, long, LIST or FILE")
    check_numbers(args)


def check_used(
    args: argparse.Namespace,
    measured: MeasuredCosts | None,
    *,
    unlike: bool,
    split: bool,
    num_chunks: int,
) -> None:
    """Refuse flags that change nothing in a simulation without slices.

    Args:
        unlike: ``--lengths`` gives sequences in tokens.
        split: schedules have a W apart from B.
        num_chunks: model chunks of a rank.
    """
    if measured:
        own = {"pp": measured.num_ranks, "chunks": measured.num_chunks, "hop": None}
        other = {name for name, value in own.items() if getattr(args, name) != value}
        _refuse(
            args, other, f"--costs {args.costs} has its own ranks, chunks and hops; leave out {{}}"
        )
    if args.condition:
        _refuse(args, {"hop"}, f"--condition {args.condition} has hops of its own; leave out {{}}")
    if not unlike:
        _refuse(args, {"longest"}, "{} needs --lengths sft, long, LIST or FILE")
    names = [*(args.policy or ["dynamic"]), *((*_OF_STATIC, "dynamic") if args.compare else ())]
    used = {flag for name in names for flag in _OF_STATIC.get(name, _OF_SCHEDULES)}
    if not split:
        used -= {"w_pieces"} | (set() if "zb-h1" in names else {"beta"})
    if num_chunks == 1:
        used.discard("group")
    fused, one = "" if split else " with a fused backward", " of one chunk" * (num_chunks == 1)
    shown = ", ".join(dict.fromkeys(names))
    _refuse(
        args,
        set(_OF_SCHEDULES) - used,
        f"{{}} changes nothing in {shown}{fused}{one}; leave it out",
    )


def _refuse(args: argparse.Namespace, names: Collection[str], text: str) -> None:
    """Refuse the given ones of some flags, which ``{}`` in the text stands for."""
    found = [f"--{name.replace('_', '-')}" for name in args.given if name in names]
    if found:
        raise ConfigError(text.replace("{}", ", ".join(found)))
