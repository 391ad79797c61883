"""Runs with a known disturbance, and their analysis."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.summary import Analysis, analyse
from megatron.dpp.report.reader import open_run
from tests.report.synthetic import MS, Run, base_cost, write

CAUSES = ("slow-rank", "slow-link", "jitter", "heavy-stage", "transient")


def call(main: Callable[..., int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command's status and what it printed, without a process of its own."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main([*arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())


def draw(*key: int | str) -> random.Random:
    return random.Random("/".join(map(str, key)))


def inject(run: Run, cause: str, seed: int) -> Run:
    """The same run with one disturbance. The seed chooses its rank or link."""
    culprit = draw(seed, "who").randrange(run.ranks - 1)

    def cost(iteration: int, rank: int, kind: str, chunk: int, microbatch: int) -> int:
        factor = 1.0
        last = (rank, chunk) == (run.ranks - 1, run.chunks - 1)
        if (cause == "slow-rank" and rank == culprit) or (cause == "heavy-stage" and last):
            factor = 1.5
        elif cause == "jitter":
            noise = draw(seed, iteration, rank, kind, chunk, microbatch)
            factor = max(1.0, noise.lognormvariate(-0.045, 0.3))
        elif cause == "transient" and rank == culprit:
            factor = 2.0 if draw(seed, iteration, kind, chunk, microbatch).random() < 0.25 else 1.0
        return round(base_cost(run, kind) * factor)

    def hop(iteration: int, source: int, destination: int) -> int:
        slow = cause == "slow-link" and {source, destination} == {culprit, culprit + 1}
        return 100_000 + (12 * MS if slow else 0)

    return dataclasses.replace(run, cost=cost, hop=hop, seed=seed)


def culprit_of(run: Run, cause: str, seed: int) -> str | None:
    """The name that the analysis must give."""
    who, chunk = draw(seed, "who").randrange(run.ranks - 1), run.chunks - 1
    place = "stage {0} (rank {0})".format
    return {
        "none": None,
        "slow-rank": place(who),
        "transient": place(who),
        "slow-link": f"{place(who)} and {place(who + 1)}",
        "heavy-stage": f"stage {run.ranks - 1}" + (f", chunk {chunk}" if chunk else ""),
    }.get(cause, "all ranks")


def analysed(run: Run, directory: Path) -> Analysis:
    files = open_run(write(run, directory))
    return analyse(files, align(files))
