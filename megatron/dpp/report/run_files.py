"""The files of a run: where they are, and its metrics and settings. Any may be missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import DataError, require
from megatron.dpp.locks import check_free
from megatron.dpp.report.analysis.report_data import Training
from megatron.dpp.report.reader import FILE_PATTERN, is_whole
from megatron.dpp.safe_files import open_to_read, read_bytes, replacing

_TAIL_BYTES = 1 << 16
_TRACES = ("traces/*/", "traces/", "*/", "")
"""Places of trace files below the home of a run."""
_FRESH_S = 60.0
"""Metrics so young belong to a run that goes on, on another host for one."""
METRICS, SETTINGS = "metrics.jsonl", "settings.yaml"
STATE = "state.json"
STATES = ("starting", "running", "finished", "stopped", "failed")
"""What a run can be in; the last three are ends."""


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

    @property
    def since(self) -> float:
        """The time at which it came into its state."""
        return self.times[self.state]

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
        "process_began": psutil.Process().create_time(),
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
        last = state.since
        here = found["host"] == socket.gethostname()
        lives = not here or _lives(found["process"], found["process_began"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if state.ended or lives:
        return state
    by = f"process {found['process']} ended without saying why"
    return RunState("failed", {**times, "failed": last}, by)


def _lives(process: int, began: float) -> bool:
    try:
        return abs(psutil.Process(process).create_time() - began) < 1.0
    except psutil.Error:
        return False


@dataclass(frozen=True)
class RunPlace:
    """Directories of one run, without links.

    Args:
        home: where its metrics and settings lie.
        chosen: the folder of trace files that was asked for, None for the newest one.
    """

    home: Path
    chosen: Path | None = None

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
                f"{self.home}: no trace (files are called {FILE_PATTERN}); train with --trace, or "
                "with TRACE=1 in a launch script"
            )
        return folder

    def state(self) -> str:
        """``running`` while a process holds the directory, or has just written a line that is not
        the last iteration's; else ``ended``.
        """
        try:
            check_free(self.home, "run")
        except DataError:
            return "running"
        with contextlib.suppress(OSError):
            if time.time() - (self.home / METRICS).stat().st_mtime < _FRESH_S:
                found = read_training(self.home, last_only=True)
                if found.total is None or found.iteration < found.total:
                    return "running"
        return "ended"


def find_run(name: str | os.PathLike[str], root: Path = ROOT) -> RunPlace:
    """The run that ``name`` means: its home, a folder of its traces, a file in one of them, or a
    link to any. A relative name counts from the working directory, else from ``root``.

    Raises:
        DataError: there is no such directory.
    """
    path = Path(name)
    path = path if path.exists() else root / path
    if not path.exists():
        raise DataError(f"{name}: no such directory")
    real = path.resolve()
    real = real.parent if real.is_file() else real
    if real.name == "traces":
        return RunPlace(real.parent)
    if any(real.glob(FILE_PATTERN)):
        return RunPlace(real.parent.parent if real.parent.name == "traces" else real.parent, real)
    return RunPlace(real)


def read_metrics(path: Path, *, last_only: bool = False) -> list[dict[str, Any]]:
    """The training lines of a metrics file in order; empty where there is none.

    A run that resumed replaces the iterations that it repeats. A last line that is being written is
    left out, as are evaluations. ``last_only`` reads no more than the file's end.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError), open_to_read(path) as file:
        if last_only:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(line)
                if not isinstance(values, dict) or "set" in values:
                    continue
                if not is_whole(values.get("iteration")):
                    continue
                values = {
                    name: value
                    for name, value in values.items()
                    if is_whole(value) or type(value) is not int
                }
                while found and found[-1]["iteration"] > values["iteration"]:
                    found.pop()
                if found and found[-1]["iteration"] == values["iteration"]:
                    values = found.pop() | values
                found.append(values)
    return found


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that a run was given, and all of them; empty where there is no file."""
    given: dict[str, Any] = {}
    every: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in read_bytes(path).decode(errors="replace").splitlines():
            match = re.fullmatch(r"(# )?(\w+): (.+)", line)
            with contextlib.suppress(ValueError, RecursionError):
                if match:
                    every[match[2]] = json.loads(match[3])
                    if not match[1]:
                        given[match[2]] = every[match[2]]
    return given, every


def model_text(settings: dict[str, Any]) -> str:
    """``8 layers of 128, 4 heads, sequence 128, ...``; empty where settings say nothing."""
    if not settings.get("num_layers"):
        return ""
    dtype = str(settings.get("params_dtype", "")).removeprefix("torch.")
    parts = [f"{settings['num_layers']} layers of {settings.get('hidden_size')}"]
    for name, text in (
        ("num_attention_heads", "{} heads"),
        ("seq_length", "sequence {}"),
        ("padded_vocab_size", "vocabulary {}"),
        ("global_batch_size", "batch {}"),
        ("micro_batch_size", "microbatch {}"),
    ):
        if settings.get(name):
            parts.append(text.format(settings[name]))
    return ", ".join([*parts, *([dtype] if dtype else [])])


def _named(settings: dict[str, Any], name: str, home: Path, default: str) -> Path:
    """The path in a setting of a run; a relative one counts from where the run was started."""
    given, start = settings.get(name), settings.get("working_directory")
    if not given or not isinstance(given, str):
        return home / default
    return (Path(start) if isinstance(start, str) else home) / given


def checkpoints_of(settings: dict[str, Any], home: Path) -> list[int]:
    """Iterations of the checkpoints in the directory that the settings name (``save``)."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # a name of 5,000 characters, or with a zero
        for path in _named(settings, "save", home, "checkpoints").glob("iter_*"):
            number = path.name.removeprefix("iter_")
            if number.isascii() and number.isdecimal():
                found.append(int(number))
    return sorted(found)


def read_training(
    home: Path, metrics_file: str | None = None, *, last_only: bool = False
) -> Training:
    """The metrics and settings of the run in ``home``; ``last_only``: only the last metrics."""
    given, every = read_settings(home / SETTINGS)
    path = Path(metrics_file) if metrics_file else home / METRICS
    if not metrics_file and not path.is_file():
        path = _named(every, "metrics_file", home, METRICS)
    return Training(
        home=home,
        metrics=read_metrics(path, last_only=last_only),
        model=model_text(every),
        flags={f"--{name.replace('_', '-')}": value for name, value in given.items()},
        total=every["train_iters"] if is_whole(every.get("train_iters")) else None,
        checkpoints=checkpoints_of(every, home),
    )
