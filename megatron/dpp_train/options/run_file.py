"""The checked settings of a run as a file: the launcher writes it, the ranks read it.

The file is JSON. Reading it gives the :class:`RunConfig` that was written, with tuples as tuples.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.dpp import strict_json
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.text_files import read_text

FLAG = "--run-config"
"""The training scripts' flag that names such a file; no other goes with it."""
_TUPLE = "tuple"


def write(config: RunConfig, task_name: str, path: Path) -> Path:
    """Write ``config`` into ``path``; an earlier file there is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    scratch = path.with_suffix(".new")
    with open_text_to_write(scratch) as file:
        file.write(_text(config, task_name))
    scratch.replace(path)
    return path


def in_memory(config: RunConfig, task_name: str) -> str:
    """Keep ``config`` in memory; the path under which child processes find it.

    It lives as long as this process, and as the program that replaces it.
    """
    file = os.memfd_create("run_config", 0)  # inherited over exec
    with os.fdopen(os.dup(file), "w", encoding="utf-8") as stream:
        stream.write(_text(config, task_name))
    return f"/proc/{os.getpid()}/fd/{file}"


def _text(config: RunConfig, task_name: str) -> str:
    content = {
        "task": task_name,
        "settings": _plain(vars(config)),
        "given": config.given,
        "parsed": _plain(config.parsed),
    }
    return json.dumps(content, indent=1) + "\n"


def read(path: str, task_name: str, world_size: int) -> RunConfig:
    """The settings that :func:`write` wrote.

    Args:
        task_name: ``gpt`` or ``bert``, whose script reads the file.
        world_size: processes of this job.

    Raises:
        ConfigError: the file is for another script or another number of processes.
        DataError: it cannot be read.
    """
    try:
        content = strict_json.loads(read_text(path, FLAG), object_hook=_tuple)
        task, settings = content["task"], content["settings"]
        config = RunConfig.of(settings, content["given"], content["parsed"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{FLAG} {path}: no settings of a run ({error!r})") from error
    if task != task_name:
        raise ConfigError(f"{FLAG} {path}: settings of pretrain_{task}.py")
    if config.world_size != world_size:
        raise ConfigError(
            f"{FLAG} {path}: settings of {config.world_size} processes, and {world_size} run"
        )
    return config


def _plain(value: Any) -> Any:
    """``value`` with its tuples marked."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(each) for each in value]}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _tuple(found: dict[str, Any]) -> Any:
    return tuple(found[_TUPLE]) if set(found) == {_TUPLE} else found
