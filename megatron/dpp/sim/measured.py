"""Cost files: measured times of a run.

A cost file is JSON. Times are in seconds; a list of samples has at least one entry::

    {"format": "dpp-costs", "version": 1, "num_ranks": 4, "num_chunks": 2,
     "stages": [{"F": [...], "B": [...], "W": [...]}, ...], "hops": [[...], ...]}

``stages`` has ``num_ranks * num_chunks`` entries in Megatron's order of virtual stages, ``hops``
one fewer (stage ``s`` to ``s + 1``). ``W`` is empty for a run with a fused backward; only fused
schedules can be simulated from it. ``megatron-dpp report`` writes such files.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import read_bytes
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop, Shape

_FORMAT, _VERSION = "dpp-costs", 1


@dataclass(frozen=True)
class MeasuredCosts:
    """Samples of times in seconds.

    Args:
        tasks: ``tasks[stage][kind]`` are samples; ``W`` may be empty.
        hops: ``hops[s]`` are samples of the way from stage ``s`` to ``s + 1``.
    """

    num_ranks: int
    num_chunks: int
    tasks: list[tuple[list[float], list[float], list[float]]]
    hops: list[list[float]]

    @property
    def split(self) -> bool:
        """Weight gradients were measured apart."""
        return any(samples[Kind.W] for samples in self.tasks)

    def costs(self, num_microbatches: int, rng: random.Random) -> Costs:
        """Costs of an iteration, drawn from the samples."""

        def row(samples: list[float]) -> list[float]:
            return [rng.choice(samples) if samples else 0.0 for _ in range(num_microbatches)]

        hops = [Hop(rng.choice(samples) / 2, rng.choice(samples) / 2) for samples in self.hops]
        forward, backward, weight = (
            [row(samples[kind]) for samples in self.tasks] for kind in Kind
        )
        return Costs((forward, backward, weight), hops)

    def shape(self, num_microbatches: int) -> Shape:
        return Shape(self.num_ranks, self.num_chunks, num_microbatches)


def load_costs(path: str | Path) -> MeasuredCosts:
    """Read a cost file.

    Raises:
        DataError: it is missing, has another format, or is incomplete; names what is wrong.
    """
    try:
        data = strict_json.loads(read_bytes(path))
    except OSError as error:
        raise DataError(f"cost file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"cost file {path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DataError(f'cost file {path}: its "format" is not "{_FORMAT}"')
    if data.get("version") != _VERSION:
        version = shown(data.get("version"))
        raise DataError(f"cost file {path}: version {version}, this reads {_VERSION}")
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{type(error).__name__}: {one_line(error, 200)}"
        raise DataError(f"cost file {path}: {what}") from error


def _parse(data: dict[str, Any]) -> MeasuredCosts:
    num_ranks, num_chunks = int(data["num_ranks"]), int(data["num_chunks"])
    num_stages, stages, hops = num_ranks * num_chunks, data["stages"], data["hops"]
    if len(stages) != num_stages or len(hops) != num_stages - 1:
        raise ValueError(
            f"{num_ranks} ranks of {num_chunks} chunks need {num_stages} stages and "
            f"{num_stages - 1} hops; it has {len(stages)} and {len(hops)}"
        )
    tasks = [
        (_samples("F", stage["F"]), _samples("B", stage["B"]), _samples("W", stage["W"], least=0))
        for stage in stages
    ]
    ways = [_samples(f"hop {number}", hop) for number, hop in enumerate(hops)]
    return MeasuredCosts(num_ranks, num_chunks, tasks, ways)


def _samples(name: str, given: Any, least: int = 1) -> list[float]:
    samples = [float(sample) for sample in given]
    if len(samples) < least or any(not 0 <= sample < float("inf") for sample in samples):
        raise ValueError(f"{name} needs {least} or more times, none negative; it has {samples}")
    return samples
