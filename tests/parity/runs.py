"""Runs for the parity tests: start a training script on a few ranks, read its metrics file."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runtime.launcher import REPOSITORY, start, wait


@dataclass(frozen=True)
class Result:
    """Metrics of a run: iterations, evaluations, and the hash of every rank's final parameters."""

    iterations: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    hashes: dict[str, str]

    def column(self, name: str) -> list[float]:
        """One value of every iteration."""
        return [row[name] for row in self.iterations]


def train(
    folder: Path, name: str, num_ranks: int, flags: str, *more: str, script: str = "pretrain_gpt.py"
) -> Result:
    """Run to the end, and fail with what the ranks printed if one of them did not."""
    metrics = folder / f"{name}.jsonl"
    arguments = [*shlex.split(flags), "--metrics-file", str(metrics), *more]
    finished = wait(start(REPOSITORY / script, num_ranks, arguments), timeout=240)
    for rank, each in enumerate(finished):
        assert each.returncode == 0, f"rank {rank} of {name}:\n{each.output[-6000:]}"
    return read(metrics)


def read(metrics: Path) -> Result:
    """Reads the ``--metrics-file`` of a run."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Result(
        [row for row in rows if "learning rate" in row],
        [row for row in rows if "set" in row],
        next((row["parameters_sha256"] for row in rows if "parameters_sha256" in row), {}),
    )
