"""A run that a Python program starts: :func:`run`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DppError
from megatron.dpp.naming import flag_name
from megatron.dpp.processes import bound_to_this
from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp_train.launch.flags import ROOT
from megatron.dpp_train.launch.job import Begun, Job, begin
from megatron.dpp_train.options import environment
from megatron.dpp_train.options.arguments import build_parser
from megatron.dpp_train.options.run_config import RunConfig, Settings


def run(
    config: RunConfig,
    *,
    arch: str = "gpt",
    processes: int | None = None,
    directory: str | Path | None = None,
) -> Path:
    """Train on this machine, as ``megatron-dpp train`` does with the same flags.

    Args:
        config: the settings; what is left out has Megatron's default.
        arch: ``gpt`` or ``bert``.
        processes: one per GPU by default, else 1.
        directory: of the run; a new one below ``runs`` by default.

    Returns:
        The directory of the run: ``train.log``, ``metrics.jsonl``, ``settings.yaml``.

    Raises:
        ConfigError: settings that cannot work, before any process starts.
        DataError: a file is missing or broken, or another run writes a directory of this one.
        DppError: the training failed.
    """
    job = Job(per_node=processes or environment.count_gpus(os.environ) or 1)
    environ = dict(os.environ)
    if directory is not None:
        environ["RUN_DIR"] = str(directory)
    if config.device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    begun = begin(job, arch, _given(config), environ)
    assert begun.home is not None and begun.lock is not None  # a single node has both
    script = ROOT / f"pretrain_{arch}.py"
    with begun.lock:
        code = _copy_output([*job.torchrun(sys.executable), str(script)], begun, begun.home)
    if code:
        raise DppError(f"the run in {begun.home} ended with exit code {code}; see its train.log")
    return begun.home


def _copy_output(command: Sequence[str], begun: Begun, home: Path) -> int:
    """The exit code of torchrun, whose output goes into the log and to ``sys.stdout``, which need
    not be a file: a notebook has a cell there."""
    with (
        open_text_to_write(home / "train.log", append=True) as log,
        subprocess.Popen(
            [*command, *begun.words], env=begun.env, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=bound_to_this(),
        ) as process,
    ):  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    return process.returncode


def _given(config: RunConfig) -> Settings:
    """``config`` with the settings that differ from their defaults as given ones.

    Raises:
        ConfigError: a value of another type than its setting has, or none of its choices.
    """
    defaults, given = vars(RunConfig()), {}
    actions = {action.dest: action for action in reversed(build_parser()._actions)}
    for name, value in vars(config).items():
        if value != defaults[name] and name in actions:
            _check_type(name, value, actions[name])
            given[name] = flag_name(name)
    return Settings.of(vars(config), given, dict(vars(config)))


_TYPES: dict[object, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,)}
"""Type of a flag -> types of the values that it may have."""


def _check_type(name: str, value: Any, action: argparse.Action) -> None:
    kinds = _TYPES.get(action.type or str, (object,)) if action.nargs != 0 else (bool,)
    several = action.nargs and isinstance(value, list | tuple)
    for each in value if several else [value]:
        is_other_bool = isinstance(each, bool) and kinds[0] in (int, float)
        if each is not None and (is_other_bool or not isinstance(each, kinds)):
            raise ConfigError(f"{name}={value!r}: expected {kinds[0].__name__}")
        if action.choices is not None and each not in action.choices:
            names = ", ".join(map(str, action.choices))
            raise ConfigError(f"{name}={value!r}: expected one of {names}")
