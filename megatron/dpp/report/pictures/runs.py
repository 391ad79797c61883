"""Names and colours of the runs of a report, and of the ranks of a run."""

from __future__ import annotations

from typing import NamedTuple

from megatron.dpp.report.analysis import places
from megatron.dpp.report.analysis.report_data import Pipeline, RankRow, Report

RUN_COLOURS = ("this", "other", "run3", "run4", "run5", "run6")
_LONGEST_NAME = 16


class Shown(NamedTuple):
    """A run as pictures and tables show it."""

    name: str
    colour: str
    report: Report


class Traced(NamedTuple):
    """A traced run as pictures and tables show it."""

    name: str
    colour: str
    pipeline: Pipeline


def runs_of(report: Report) -> list[Shown]:
    """This run and those beside it. Two schedules name their runs, else short directories do."""
    runs = [report, *report.others]
    colours = [RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(runs))]
    return [Shown(*each) for each in zip(_names(runs), colours, runs, strict=True)]


def traced_runs_of(report: Report) -> list[Traced]:
    """The runs of :func:`runs_of` that were traced."""
    return [
        Traced(name, colour, run.pipeline)
        for name, colour, run in runs_of(report)
        if run.pipeline is not None
    ]


def _names(runs: list[Report]) -> list[str]:
    schedules = [run.pipeline.name if run.pipeline else "" for run in runs]
    if len(runs) == 1:
        return schedules
    if len(runs) == 2 and set(schedules) == {"dynamic", "static"}:
        return schedules
    homes = [_short(name) for name in _distinct([run.training.home.name for run in runs])]
    if len(set(homes)) == len(homes):
        return homes
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def _distinct(names: list[str]) -> list[str]:
    """The parts in which names with equally many parts differ: ``tp2`` and ``tp4`` of
    ``20260102-030405-gpt-8x128-tp2`` and ``20260102-030506-gpt-8x128-tp4``.
    """
    split = [name.split("-") for name in names]
    if len({len(parts) for parts in split}) == 1:
        differ = [parts for parts in zip(*split, strict=True) if len(set(parts)) > 1]
        undated = [parts for parts in differ if not all(part.isdigit() for part in parts)]
        for kept in (undated, differ):
            short = ["-".join(parts) for parts in zip(*kept, strict=True)]
            if len(set(short)) == len(names):
                return short
    return names


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def by_stage(pipeline: Pipeline) -> list[RankRow]:
    """The rows of ranks in the order of stage, replica and tensor rank."""
    return sorted(pipeline.ranks, key=lambda row: (row.pipeline, row.data, row.tensor))


def short_name(row: RankRow, pipeline: Pipeline) -> str:
    """A rank by its place, short: ``stage 0``, ``stage 0 r1 t0``."""
    replica = f" r{row.data}" if pipeline.run.data > 1 else ""
    return f"stage {row.pipeline}{replica}" + (f" t{row.tensor}" if pipeline.run.tensor > 1 else "")


def long_name(row: RankRow, pipeline: Pipeline) -> str:
    """A rank by place and number: ``stage 0, replica 1, tensor rank 0 (rank 2)``."""
    replica = row.data if pipeline.run.data > 1 else None
    tensor = row.tensor if pipeline.run.tensor > 1 else None
    return places.full_name(row.rank, row.pipeline, replica, tensor)


def places_note(pipeline: Pipeline) -> str:
    """The meaning of the letters of ``short_name``; empty where it has none."""
    letters = ["r: replica"] if pipeline.run.data > 1 else []
    return ", ".join(letters + (["t: tensor rank"] if pipeline.run.tensor > 1 else []))
