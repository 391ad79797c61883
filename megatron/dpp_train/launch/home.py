"""A directory for each run: ``runs/DATE-MODEL-LAYOUT`` with its log, settings, metrics and traces.

``runs/latest`` links to the newest. ``RUN_DIR`` (``train``: ``--run-dir``) names another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from megatron.dpp.errors import DataError, core_setting
from megatron.dpp.locks import check_free
from megatron.dpp.safe_files import read_bytes
from megatron.dpp_train.options import settings
from megatron.dpp_train.options.run_config import RunConfig, Settings

_RUNS, _METRICS = Path("runs"), "metrics.jsonl"


def make_home(arch: str, args: Settings, world_size: int, env: Mapping[str, str]) -> Path:
    """Make the directory of a run that starts now.

    Args:
        args: parsed flags of the training script.

    Raises:
        DataError: it cannot be made.
    """
    named = env.get("RUN_DIR")
    try:
        if named:
            Path(named).mkdir(parents=True, exist_ok=True)
            return Path(named).absolute()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_model_and_layout(arch, args, world_size)}"
        home = _new_directory(_RUNS.absolute() / name)
        latest = home.with_name("latest")
        scratch = home.with_name(f".latest-{os.getpid()}")
        scratch.symlink_to(home.name)
        scratch.replace(latest)
    except OSError as error:
        raise DataError(
            f"{named or _RUNS.absolute()}: {error.strerror}; name a directory for this run with "
            f"{core_setting('run_dir')}"
        ) from error
    return home


def check_home(args: Settings, env: Mapping[str, str], *, first_node: bool) -> None:
    """Refuse directories that another run writes into, and a ``RUN_DIR`` in which an earlier run
    began to train. Only a run that goes on from that run's checkpoints may add to its files.

    Args:
        args: parsed flags of the training script.
        first_node: of the run, which holds the locks of its directories.

    Raises:
        DataError: naming the other run's process, or its files.
    """
    named = env.get("RUN_DIR")
    for flag, directory in (("--save", args.save), (core_setting("run_dir"), named)):
        if directory and first_node:
            check_free(directory, flag)
    if not named:
        return
    home = Path(named)
    there = [name for name in (settings.FILE_NAME, _METRICS) if (home / name).is_file()]
    saved = _saved_by(home)
    if there and not _goes_on(args, home, saved):
        saved = saved or args.save
        how = f", or let that run go on: --load {saved}" if saved else ""
        raise DataError(
            f"{core_setting('run_dir', named)}: {there[0]} of an earlier run is there; name "
            f"another directory{how}"
        )


def _goes_on(args: Settings, home: Path, saved: str | None) -> bool:
    """True where the run loads what the run in ``home`` saved. Its path may read otherwise by now:
    the directory was moved, is mounted elsewhere, or was named from another directory."""
    if not args.load or args.finetune:
        return False
    load = Path(args.load).resolve()
    same = (Path(each).resolve() for each in (saved, args.save) if each)
    return load in same or load.is_relative_to(home.resolve())


def _saved_by(home: Path) -> str | None:
    """The directory that the run in ``home`` saved its checkpoints to."""
    with contextlib.suppress(OSError, ValueError):
        text = read_bytes(home / settings.FILE_NAME).decode()
        found = re.search(r"^save: (.+)$", text, re.MULTILINE)
        saved: str | None = json.loads(found[1]) if found else None
        return saved
    return None


def with_home(args: RunConfig, home: Path) -> RunConfig:
    """``args`` with places in ``home`` for what they name no place for."""
    names = []
    if not args.metrics_file:
        names.append(("metrics_file", "--metrics-file", _METRICS))
    if not args.tensorboard_dir and importlib.util.find_spec("tensorboard"):
        names.append(("tensorboard_dir", "--tensorboard-dir", "tensorboard"))
    if args.trace and "trace_dir" not in args.given:
        names.append(("trace_dir", "--trace-dir", "traces"))
    if not args.save and 0 < (args.save_interval or 0) <= (args.train_iters or 0):
        names.append(("save", "--save", "checkpoints"))
    return args.with_given({name: (flag, str(home / own)) for name, flag, own in names})


def _model_and_layout(arch: str, args: Settings, world_size: int) -> str:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    replicas = world_size // (tensor * pipeline * args.context_parallel_size)
    sizes = f"{arch}-{args.num_layers}x{args.hidden_size}"
    return f"{sizes}-tp{tensor}-pp{pipeline}-dp{replicas}"


def _new_directory(path: Path) -> Path:
    """``path``, or with -2, -3, ... where another run of this second has it."""
    for number in range(1, 1000):
        chosen = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise FileExistsError(17, "File exists", str(path))
