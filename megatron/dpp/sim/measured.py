"""Cost files: measured times of a run.

A cost file is JSON. Times are in seconds, sizes in bytes; a list of samples has at least one
entry::

    {"format": "dpp-costs", "version": 1, "num_ranks": 4, "num_chunks": 2,
     "stages": [{"F": [...], "B": [...], "W": [...], "activation_bytes": 1234}, ...],
     "hops": [[...], ...],
     "run": {"seconds": [...], "num_microbatches": 8, "dynamic": true}}

``stages`` has ``num_ranks * num_chunks`` entries in Megatron's order of virtual stages, ``hops``
one fewer (stage ``s`` to ``s + 1``). ``W`` is empty for a run with a fused backward; only fused
schedules can be simulated from it. ``activation_bytes`` and ``run`` are optional; ``run`` has the
time of the pipeline's part of each iteration. ``megatron-dpp report`` writes such files.
"""

from __future__ import annotations

import random
import statistics
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
class MeasuredRun:
    """The run that the samples are of.

    Args:
        seconds: median of the pipeline's part of an iteration; of two the shorter, since one of
            them may have a hiccup.
        dynamic: its schedule was dynamic; otherwise Megatron's own.
    """

    seconds: float
    num_microbatches: int
    dynamic: bool


@dataclass(frozen=True)
class MeasuredCosts:
    """Samples of times in seconds.

    Args:
        tasks: ``tasks[stage][kind]`` are samples; ``W`` may be empty.
        hops: ``hops[s]`` are samples of the way from stage ``s`` to ``s + 1``.
        activation_bytes: of each stage's activation for one microbatch, where known.
        run: what it took as a whole, where known.
    """

    num_ranks: int
    num_chunks: int
    tasks: list[tuple[list[float], list[float], list[float]]]
    hops: list[list[float]]
    activation_bytes: list[float | None]
    run: MeasuredRun | None = None

    @property
    def split(self) -> bool:
        """Weight gradients were measured apart."""
        return any(samples[Kind.W] for samples in self.tasks)

    def costs(self, num_microbatches: int, rng: random.Random | None = None) -> Costs:
        """Costs of an iteration: drawn from the samples, or their medians where ``rng`` is None."""
        one = statistics.median if rng is None else rng.choice

        def row(samples: list[float]) -> list[float]:
            if not samples:
                return [0.0] * num_microbatches
            if rng is None:
                return [statistics.median(samples)] * num_microbatches
            return [rng.choice(samples) for _ in range(num_microbatches)]

        def table(kind: Kind) -> list[list[float]]:
            return [row(samples[kind]) for samples in self.tasks]

        hops = [Hop(one(samples) / 2, one(samples) / 2) for samples in self.hops]
        return Costs((table(Kind.F), table(Kind.B), table(Kind.W)), hops)

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
    return parse_costs(data, f"cost file {path}")


def parse_costs(data: Any, name: str) -> MeasuredCosts:
    """Read a cost file's content; ``name`` is its origin, for errors.

    Raises:
        DataError: it has another format, or is incomplete; names what is wrong.
    """
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DataError(f'{name}: its "format" is not "{_FORMAT}"')
    if data.get("version") != _VERSION:
        raise DataError(f"{name}: version {shown(data.get('version'))}, this reads {_VERSION}")
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name}: {type(error).__name__}: {one_line(error, 200)}") from error


def _parse(data: dict[str, Any]) -> MeasuredCosts:
    num_ranks, num_chunks = int(data["num_ranks"]), int(data["num_chunks"])
    num_stages = num_ranks * num_chunks
    stages, hops = data["stages"], data["hops"]
    if len(stages) != num_stages or len(hops) != num_stages - 1:
        raise ValueError(
            f"{num_ranks} ranks of {num_chunks} chunks need {num_stages} stages and "
            f"{num_stages - 1} hops; it has {len(stages)} and {len(hops)}"
        )
    tasks = [
        (_samples(stage, "F"), _samples(stage, "B"), _samples(stage, "W", least=0))
        for stage in stages
    ]
    sizes = [_size(stage.get("activation_bytes")) for stage in stages]
    named = [_samples({f"hop {s}": hop}, f"hop {s}") for s, hop in enumerate(hops)]
    return MeasuredCosts(num_ranks, num_chunks, tasks, named, sizes, _run(data.get("run")))


def _run(given: Any) -> MeasuredRun | None:
    if given is None:
        return None
    seconds = statistics.median_low(_samples(given, "seconds"))
    num_microbatches = int(given["num_microbatches"])
    if num_microbatches < 1 or not seconds:
        raise ValueError(f"run of {num_microbatches} microbatches in {seconds} s: both are above 0")
    return MeasuredRun(seconds, num_microbatches, bool(given["dynamic"]))


def _size(given: Any) -> float | None:
    if given is None:
        return None
    if not 0 <= float(given) < float("inf"):
        raise ValueError(f"activation_bytes {given}: must be a size of 0 or more")
    return float(given)


def _samples(entry: dict[str, Any], name: str, least: int = 1) -> list[float]:
    samples = [float(sample) for sample in entry[name]]
    if len(samples) < least or any(not 0 <= sample < float("inf") for sample in samples):
        raise ValueError(f"{name} needs {least} or more times, none negative; it has {samples}")
    return samples
