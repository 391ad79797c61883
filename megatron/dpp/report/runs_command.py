"""``megatron-dpp runs``: a list of runs.

megatron-dpp runs [DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError
from megatron.dpp.report.analysis.formats import number, time_left
from megatron.dpp.report.run_files import METRICS, SETTINGS, RunPlace, find_run, read_training

_COLUMNS = ("run", "started", "state", "iteration", "loss", "tokens/s", "left", "saved", "trace")


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
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _is_run(path: Path) -> bool:
    """True for the directory of a run; a warning names one that this user may not look into."""
    try:
        return path.is_dir() and not path.is_symlink() and _holds_a_run(path)
    except PermissionError as error:
        print(f"warning: {path}: {error.strerror}", file=sys.stderr, flush=True)
        return False


def _holds_a_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, SETTINGS)) or bool(
        RunPlace(path).traces()
    )


def _began(path: Path) -> float:
    """Time of the file that a run writes first; of the directory where it is missing."""
    settings = path / SETTINGS
    return (settings if settings.is_file() else path).stat().st_mtime


def _row(place: RunPlace) -> list[str]:
    training, state = read_training(place.home, last_only=True), place.state()
    loss, speed, left = training.last_loss, training.median("tokens/s"), training.seconds_left
    total = f" of {training.total}" if training.total else ""
    return [
        place.home.name,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(_began(place.home))),
        state,
        f"{training.iteration}{total}" if training.metrics else "-",
        "-" if loss is None else f"{loss:.4g}",
        "-" if speed is None else number(speed),
        time_left(left) if left and state == "running" else "-",
        str(training.checkpoints[-1]) if training.checkpoints else "-",
        "yes" if place.traces() else "no",
    ]


main = command("megatron-dpp runs", _parser, _run)
