"""The files of a run, any of which may be missing: where they are, its state, metrics, command.

A run's directory has ``metrics.jsonl`` (:mod:`megatron.dpp.metrics`), ``state.json``
(:func:`write_state`), ``command`` (the command line, as a shell takes it), ``train.log`` and
``traces``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import DataError, require
from megatron.dpp.files.safe_files import open_to_read, read_bytes, replacing
from megatron.dpp.report.reader import FILE_PATTERN, is_whole

METRICS, STATE, COMMAND = "metrics.jsonl", "state.json", "command"
STATES = ("starting", "running", "finished", "stopped", "failed")
"""What a run can be in; the last three are ends."""
_TRACES = ("traces/*/", "traces/", "*/", "")
"""Places of trace files below the home of a run."""
_FRESH_S = 60.0
"""Metrics so young belong to a run that goes on, where no state was written."""


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Args:
        state: one of ``STATES``.
        times: seconds since 1970 at which it came into each of its states.
        by: who stopped it, or what failed.
    """

    state: str
    times: dict[str, float]
    by: str | None = None

    @property
    def ended(self) -> bool:
        """True once nothing more will happen."""
        return self.state in STATES[2:]

    def __str__(self) -> str:
        by = f" by {self.by}" if self.state == "stopped" and self.by else ""
        return self.state + (f": {self.by}" if self.by and not by else by)


def write_state(directory: str | os.PathLike[str], state: str, by: str | None = None) -> None:
    """Write ``state.json`` of a run's directory: the new state, its time, and this process, whose
    end without an end of the run is read as ``failed``.

    Args:
        directory: the run's; it exists.
        state: one of ``STATES``. ``starting`` begins anew, also for a run that goes on in the
            directory of an earlier one.
        by: who stopped it (``Ctrl-C``, ``SIGTERM``, ``the time limit``), or what failed
            (``rank 3 (process 1234): out of memory``).
    """
    require(state in STATES, f"state {state!r}: expected one of {', '.join(STATES)}")
    before = None if state == STATES[0] else read_state(directory)
    values = {
        "state": state,
        "by": by,
        "times": {**(before.times if before else {}), state: round(time.time(), 3)},
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_began": _began(os.getpid()),
    }
    with replacing(str(Path(directory, STATE))) as file:
        file.write(json.dumps(values).encode() + b"\n")


def read_state(directory: str | os.PathLike[str]) -> RunState | None:
    """The state of the run in a directory; None where no state was written."""
    try:
        found = json.loads(read_bytes(Path(directory, STATE)))
        times = {name: float(found["times"][name]) for name in STATES if name in found["times"]}
        by = None if found["by"] is None else str(found["by"])
        state = RunState(found["state"], times, by)
        last = times[state.state]
        here = found["host"] == socket.gethostname()
        lives = not here or (_began(found["process"]) or -1) == found["process_began"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if state.ended or lives:
        return state
    by = f"process {found['process']} ended without saying why"
    return RunState("failed", {**times, "failed": last}, by)


def _began(process: object) -> int | None:
    """The clock ticks from boot to the start of a process of this host, which no jump of the wall
    clock moves; None where it has ended.
    """
    with contextlib.suppress(OSError):
        if is_whole(process):
            stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            state, *fields = stat.rpartition(")")[2].split()
            return None if state in "ZX" else int(fields[18])
    return None


@dataclass(frozen=True)
class RunPlace:
    """Directories of one run, without links.

    Args:
        home: where its metrics and state lie.
        chosen: the folder of trace files that was asked for, None for the newest one.
        metrics: the file of metrics that was asked for, None for that of the home.
    """

    home: Path
    chosen: Path | None = None
    metrics: Path | None = None

    def traces(self) -> Path | None:
        """The folder of its trace files, None as long as there are none."""
        if self.chosen is not None:
            return self.chosen
        found = [path for form in _TRACES for path in self.home.glob(f"{form}{FILE_PATTERN}")]
        return max(found, key=lambda path: path.stat().st_mtime).parent if found else None

    def need_traces(self) -> Path:
        """The folder of its trace files.

        Raises:
            DataError: there are none.
        """
        folder = self.traces()
        if folder is None:
            raise DataError(
                f"{self.home}: no trace (files are called {FILE_PATTERN}); train with --dpp-trace, "
                "or with TRACE=1 in a launch script"
            )
        return folder


def find_run(name: str | os.PathLike[str], root: Path = ROOT) -> RunPlace:
    """The run that ``name`` means: its home, a folder of its traces, a file in one of them, a link
    to any, or other metrics (``*.jsonl``). A relative name counts from the working directory, else
    from ``root``.

    Raises:
        DataError: there is no such directory.
    """
    path = Path(name)
    path = path if path.exists() else root / path
    if not path.exists():
        raise DataError(f"{name}: no such directory")
    real = path.resolve()
    if real.suffix == ".jsonl" and real.name != METRICS:
        return RunPlace(real.parent, metrics=real)
    real = real.parent if real.is_file() else real
    if real.name == "traces":
        return RunPlace(real.parent)
    if any(real.glob(FILE_PATTERN)):
        return RunPlace(real.parent.parent if real.parent.name == "traces" else real.parent, real)
    return RunPlace(real)


@dataclass
class Training:
    """The metrics of a run, and what its directory tells of it.

    Args:
        home: the run's directory.
        metrics: a line per training step, as ``megatron.dpp.metrics`` writes them.
        evaluations: (iteration, validation loss).
        flags: of the command that started it, and their values.
        state: in words; empty where unknown.
        runs: it goes on.
        checkpoint: iteration of the last checkpoint.
    """

    home: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    state: str = ""
    runs: bool = False
    checkpoint: int | None = None

    @property
    def iteration(self) -> int:
        """The last iteration; 0 before the first."""
        return int(self.metrics[-1]["iteration"]) if self.metrics else 0

    @property
    def total(self) -> int | None:
        """Iterations that the run shall have; None where unknown."""
        return self.metrics[-1].get("train_iters") if self.metrics else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the last iteration, at the median of the last 20; None where it is unknown, and
        for a run that has ended.
        """
        recent = self.series("ms")[1][-20:]
        if not recent or self.total is None or not self.runs:
            return None
        return max(self.total - self.iteration, 0) * statistics.median(recent) / 1e3

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations and values of a metric, without those that are missing; ``tokens/s`` is one,
        too.
        """
        found = []
        for line in self.metrics:
            value = line.get(name)
            if name == "tokens/s" and line.get("ms") and line.get("tokens"):
                value = line["tokens"] / line["ms"] * 1e3
            if isinstance(value, int | float) and math.isfinite(value):
                found.append((line["iteration"], float(value)))
        return [x for x, _ in found], [y for _, y in found]

    def median(self, name: str) -> float | None:
        """The median of a metric, None where there is none."""
        values = self.series(name)[1]
        return statistics.median(values) if values else None

    def last(self, name: str) -> float | None:
        """The last value of a metric, None where there is none."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def numbers(self) -> dict[str, Any]:
        """As JSON, without the series."""
        return {
            "iteration": self.iteration,
            "train_iters": self.total,
            "state": self.state,
            "loss": self.last("loss"),
            "tokens/s": self.median("tokens/s"),
            "flags": self.flags,
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in order, of steps and evaluations; empty where there is none.

    A run that resumed replaces the iterations that it repeats. A last line that is being written is
    left out.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError), open_to_read(path) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(line)
                if not isinstance(values, dict) or not is_whole(values.get("iteration")):
                    continue
                values = {k: v for k, v in values.items() if is_whole(v) or type(v) is not int}
                steps = "loss" in values
                while found and found[-1]["iteration"] >= values["iteration"] + (not steps):
                    found.pop()
                found.append(values)
    return found


def read_training(home: Path, metrics_file: str | Path | None = None) -> Training:
    """Reads the files of the run in ``home``."""
    path = Path(metrics_file) if metrics_file else home / METRICS
    lines, flags, state = read_metrics(path), _flags(home), read_state(home)
    training = Training(
        home=home,
        metrics=[line for line in lines if "loss" in line],
        evaluations=[
            (line["iteration"], line["validation_loss"])
            for line in lines
            if isinstance(line.get("validation_loss"), float) and not line.get("set")
        ],
        flags=flags,
        checkpoint=_checkpoint(Path(flags["--save"])) if flags.get("--save") else None,
    )
    if state is not None:
        training.runs, training.state = not state.ended, str(state)
        return training
    with contextlib.suppress(OSError):  # metrics just written, unless of the last step
        fresh = abs(time.time() - path.stat().st_mtime) < _FRESH_S
        training.runs = fresh and (training.total is None or training.iteration < training.total)
    training.state = "running" if training.runs else "ended"
    return training


def _flags(home: Path) -> dict[str, str]:
    """The flags of a run's command line and their values."""
    words: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        words = shlex.split(read_bytes(home / COMMAND).decode(errors="replace"))
    flags: dict[str, list[str]] = {}
    last = None
    for word in words:
        if word.startswith("--"):
            last, given, value = word.partition("=")
            flags[last] = [value] if given else []
        elif last is not None:
            flags[last].append(word)
    return {flag: " ".join(values) for flag, values in flags.items()}


def _checkpoint(folder: Path) -> int | None:
    """Iteration of the last of Megatron's checkpoints in a folder."""
    numbers = []
    with contextlib.suppress(OSError, ValueError):  # a name of 5,000 characters, or with a zero
        names = (path.name.removeprefix("iter_") for path in folder.glob("iter_*"))
        numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    return max(numbers, default=None)
