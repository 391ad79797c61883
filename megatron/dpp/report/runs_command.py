"""``megatron-dpp runs``: a list of runs.

megatron-dpp runs [DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError
from megatron.dpp.report.analysis.sentences import number, time_left
from megatron.dpp.report.run_files import (
    COMMAND,
    METRICS,
    STATE,
    RunPlace,
    find_run,
    read_state,
    read_training,
)

_COLUMNS = ("run", "started", "iteration", "loss", "tokens/s", "saved", "trace", "state", "since")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = new_parser(prog, "List the runs of a directory, the newest last.", "[DIR] [options]")
    parser.add_argument("directory", nargs="?", default="runs", metavar="DIR", help="default: runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    return parser


def _run(options: argparse.Namespace) -> int:
    home = find_run(options.directory).home
    found = sorted((path for path in home.iterdir() if _is_run(path)), key=_began)
    if not found:
        raise DataError(f"{home}: no run; a run has a directory with {METRICS} or traces")
    rows = [_row(RunPlace(path)) for path in found]
    if options.json:
        print("\n".join(json.dumps(dict(zip(_COLUMNS, row, strict=True))) for row in rows))
        return 0
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in (_COLUMNS, *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _is_run(path: Path) -> bool:
    with contextlib.suppress(PermissionError):
        return path.is_dir() and not path.is_symlink() and _holds_a_run(path)
    return False


def _holds_a_run(path: Path) -> bool:
    named = any((path / name).is_file() for name in (METRICS, STATE, COMMAND))
    return named or RunPlace(path).traces() is not None


def _began(path: Path) -> float:
    state = read_state(path)
    return min(state.times.values()) if state else path.stat().st_mtime


def _row(place: RunPlace) -> list[str]:
    training, state = read_training(place.home, last_only=True), read_state(place.home)
    loss, speed, left = training.last("loss"), training.median("tokens/s"), training.seconds_left
    total = f" of {training.total}" if training.total else ""
    return [
        place.home.name,
        _moment(_began(place.home)),
        f"{training.iteration}{total}" if training.metrics else "-",
        "-" if loss is None else f"{loss:.4g}",
        "-" if speed is None else number(speed),
        "-" if training.checkpoint is None else str(training.checkpoint),
        "yes" if place.traces() else "no",
        training.state + (f", {time_left(left)} left" if left else ""),
        _moment(state.since) if state else "-",
    ]


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


main = command("megatron-dpp runs", _parser, _run)
