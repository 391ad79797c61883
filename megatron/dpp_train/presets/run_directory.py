"""A directory for each run: ``runs/DATE-MODEL-LAYOUT`` with its log, metrics, traces and state.

``runs/latest`` links to the newest. ``RUN_DIR`` (``train``: ``--run-dir``) names another.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.presets.flags import Flags, number
from megatron.dpp_train.presets.options import CHUNKS, PIPELINE, TENSOR

METRICS, COMMAND = "metrics.jsonl", "command"


def name_of(arch: str, flags: Mapping[str, Any], replicas: int) -> str:
    """Model and layout, as ``gpt-8x128-tp2-pp2-dp1``."""
    tensor, pipeline = number(flags, TENSOR), number(flags, PIPELINE)
    sizes = f"{flags.get('--num-layers')}x{flags.get('--hidden-size')}"
    chunks = f"-v{flags[CHUNKS]}" if CHUNKS in flags else ""
    return f"{arch}-{sizes}-tp{tensor}-pp{pipeline}{chunks}-dp{replicas}"


def make(name: str, named: str | None, *, goes_on: bool) -> Path:
    """Make the directory of a run that starts now.

    Args:
        name: of model and layout.
        named: the user's directory; None for a new one below ``runs``.
        goes_on: it loads a checkpoint, and may add to an earlier run's files.

    Raises:
        DataError: it cannot be made, or an earlier run's files are in it.
    """
    try:
        if named:
            path = Path(named).absolute()
            path.mkdir(parents=True, exist_ok=True)
            if (path / METRICS).exists() and not goes_on:
                raise DataError(
                    f"{named}: {METRICS} of an earlier run is there; name another "
                    "directory for this run"
                )
            return path
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = _new_directory(Path("runs").absolute() / f"{stamp}-{name}")
        scratch = path.with_name(f".latest-{os.getpid()}")
        scratch.symlink_to(path.name)
        scratch.replace(path.with_name("latest"))
        return path
    except OSError as error:
        raise DataError(
            f"{named or Path('runs').absolute()}: {error.strerror}; name a directory "
            "for this run with --run-dir or RUN_DIR"
        ) from error


def _new_directory(path: Path) -> Path:
    """``path``, or with -2, -3, ... where another run of this second has it."""
    for count in range(1, 1000):
        chosen = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise FileExistsError(17, "File exists", str(path))


def places(flags: Mapping[str, Any], path: Path, *, saves: bool) -> Flags:
    """Flags that put a run's files into its directory, where the run names no other place."""
    found: Flags = {}
    if "--metrics-file" not in flags:
        found["--metrics-file"] = str(path / METRICS)
    if "--dpp-trace" in flags and "--dpp-trace-dir" not in flags:
        found["--dpp-trace-dir"] = str(path / "traces")
    steps, every = flags.get("--train-iters"), flags.get("--save-interval")
    saves = saves or bool(every and steps and int(every) <= int(steps))
    if saves and "--save" not in flags:
        found["--save"] = str(path / "checkpoints")
    return found


def write_command(path: Path, command: Sequence[str]) -> None:
    """Keep the command of a run in its directory, for a shell."""
    (path / COMMAND).write_bytes(os.fsencode(shlex.join(command) + "\n"))
