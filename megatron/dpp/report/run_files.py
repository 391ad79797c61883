"""The files beside a run's traces: its metrics and its settings. Both may be missing."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.report_data import Training
from megatron.dpp.safe_files import open_to_read, read_bytes

_TAIL_BYTES = 1 << 16
METRICS, SETTINGS = "metrics.jsonl", "settings.yaml"


def home_of(directory: Path) -> Path:
    """The home of the run whose traces lie in ``directory``: ``HOME/traces/data-...``."""
    parent = directory.absolute().parent
    return parent.parent if parent.name == "traces" else parent


def read_metrics(path: Path, *, last_only: bool = False) -> list[dict[str, Any]]:
    """The training lines of a metrics file in order; empty where there is none.

    A run that resumed replaces the iterations that it repeats. A last line that is being written is
    left out, as are evaluations. ``last_only`` reads no more than the file's end.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), open_to_read(path) as file:
        if last_only:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if not (isinstance(values, dict) and "iteration" in values) or "set" in values:
                    continue
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
            with contextlib.suppress(ValueError):
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


def checkpoints_of(settings: dict[str, Any], home: Path) -> list[int]:
    """Iterations of the checkpoints in the directory that the settings name (``save``)."""
    named = settings.get("save")
    folder = Path(named) if named else home / "checkpoints"
    return sorted(
        int(path.name.removeprefix("iter_"))
        for path in (folder if folder.is_absolute() else home / folder).glob("iter_*")
        if path.name.removeprefix("iter_").isdigit()
    )


def read_training(home: Path, metrics_file: str | None = None) -> Training:
    """The metrics and settings of the run in ``home``."""
    given, every = read_settings(home / SETTINGS)
    return Training(
        home=home,
        metrics=read_metrics(Path(metrics_file) if metrics_file else home / METRICS),
        model=model_text(every),
        flags={f"--{name.replace('_', '-')}": value for name, value in given.items()},
        total=every.get("train_iters"),
        checkpoints=checkpoints_of(every, home),
    )
