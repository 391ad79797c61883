"""Checks of bench_schedule.py's command line, before it starts a process."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.dpp.errors import require
from megatron.dpp.inject import Injector
from megatron.dpp.naming import flag_name
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.schedule.reference import padded_microbatches

_COUNTS = ("ranks", "tensor", "layers", "hidden", "heads", "sequence", "vocabulary", "micro_batch",
           "rounds", "topk", "expert_parallel", "runs")  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Check a parsed command line, whose ``names`` have a ``kind`` and ``num_chunks``.

    Raises:
        ConfigError: names the flag, the value and the rule.
    """
    for name in _COUNTS:
        _at_least_one(flag_name(name), getattr(args, name))
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


def _check_schedule(args: argparse.Namespace, name: Any, num: int) -> None:
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
