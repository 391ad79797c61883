"""Costs of a model's parts, so that layouts which were never run can be simulated.

A :class:`ModelCosts` holds the costs of a layer, the embedding and the head (with the loss). It is
solved from measured stage times by :func:`from_measured`, or computed from the model's shape
(``times.py``).
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.measured import MeasuredCosts

_MISFIT = 0.15
"""Largest difference of a stage's time from its parts' sum, as a share of the sum."""

Times = tuple[float, float, float]
"""Seconds of ``F``, ``B`` and ``W`` for one microbatch."""


@dataclass(frozen=True)
class PartCosts:
    """A layer, the embedding or the head.

    Args:
        activation_bytes: kept by its forward for its backward.
        state_bytes: weights, gradients and optimizer state.
        deferred_bytes: kept by a layer's backward for its weight gradients; None for as much as its
            activation. The embedding and the head defer nothing.
    """

    times: Times
    activation_bytes: float = 0.0
    state_bytes: float = 0.0
    deferred_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class SliceCosts:
    """The slices of each microbatch, where sequences are cut; the parts' costs are those of a mean
    slice, and their bytes those of the first.

    Args:
        tokens: of each slice.
        more: seconds that a layer takes more than the mean, of each slice. Later slices attend to
            more keys.
        key_bytes: of a microbatch's keys and values in one layer.
        gradient_bytes: of the gradients of these.
    """

    tokens: tuple[int, ...]
    more: tuple[Times, ...]
    key_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model's parts.

    Args:
        layer: one of ``num_layers`` transformer layers.
        embedding: before the first layer.
        head: after the last layer: final norm, output layer, loss.
        hop: seconds between neighbouring stages.
        sigma: spread of task times (of their logarithm).
        between: seconds from the end of a rank's task to the next: the host's work, copies of
            inputs and outputs, hiccups.
        slot_layers: with CUDA graphs (docs/decisions/0008-graphs.md), an activation in flight has a
            slot with room for the rank's largest chunk and this many layers more. None: no graphs.
        slices: of a microbatch; None where it is one unit.
    """

    num_layers: int
    layer: PartCosts
    embedding: PartCosts
    head: PartCosts
    hop: float = 0.0
    sigma: float = 0.0
    between: float = 0.0
    slot_layers: float | None = None
    slices: SliceCosts | None = None

    def stage_times(self, layers: Sequence[int], kind: Kind) -> list[float]:
        """Seconds of each stage's ``kind`` with ``layers[s]`` layers on stage ``s``."""
        return self._summed(layers, lambda part: part.times[kind])

    def activation_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes of each stage's activation for one microbatch."""
        return self._summed(layers, lambda part: part.activation_bytes)

    def deferred_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes that each stage keeps for its deferred weight gradients of one microbatch."""
        each = self.layer.deferred_bytes
        return [n * (self.layer.activation_bytes if each is None else each) for n in layers]

    def slot_bytes(self, layers: Sequence[int]) -> float:
        """Bytes of a slot of a rank whose stages have ``layers`` layers."""
        assert self.slot_layers is not None
        room = max(layers) + self.slot_layers if any(layers) else 0.0
        return room * self.layer.activation_bytes

    def _changed(
        self, change: Callable[..., PartCosts], *others: ModelCosts, **more: Any
    ) -> ModelCosts:
        """Each part as ``change`` gives it, from it and those of ``others``; ``more`` fields."""
        parts: dict[str, Any] = {
            name: change(*(getattr(each, name) for each in (self, *others)))
            for name in ("layer", "embedding", "head")
        }
        return dataclasses.replace(self, **parts, **more)

    def lengthened(self, factor: float) -> ModelCosts:
        """All times ``factor`` as long."""

        def longer(part: PartCosts) -> PartCosts:
            forward, backward, weight = (factor * seconds for seconds in part.times)
            return dataclasses.replace(part, times=(forward, backward, weight))

        return self._changed(longer, hop=factor * self.hop, between=factor * self.between)

    def without_layers(self) -> ModelCosts:
        """These costs without the layers' activations, as slots hold those."""
        layer = dataclasses.replace(self.layer, activation_bytes=0.0, deferred_bytes=0.0)
        return dataclasses.replace(self, layer=layer)

    def state_bytes(self, layers: Sequence[int], num_ranks: int) -> list[float]:
        """Bytes of each rank's weights, gradients and optimizer state."""
        counts = [sum(layers[rank::num_ranks]) for rank in range(num_ranks)]
        return self._summed(counts, lambda part: part.state_bytes)

    def _summed(self, layers: Sequence[int], cost: Callable[[PartCosts], float]) -> list[float]:
        """Costs by place with ``layers`` layers each; embedding first, head last."""
        each = cost(self.layer)
        costs = [n * each for n in layers]
        costs[0] += cost(self.embedding)
        costs[-1] += cost(self.head)
        return costs

    def with_memory_of(self, other: ModelCosts) -> ModelCosts:
        """These times with the memory of ``other``; activations that were measured stay."""

        def joined(mine: PartCosts, theirs: PartCosts) -> PartCosts:
            activation = mine.activation_bytes or theirs.activation_bytes
            return PartCosts(mine.times, activation, theirs.state_bytes, mine.deferred_bytes)

        return self._changed(joined, other)

    def in_slices(self, whole: ModelCosts, sliced: ModelCosts) -> ModelCosts:
        """These costs of whole microbatches for microbatches in slices.

        Args:
            whole, sliced: estimates of both, whose proportions are taken.
        """
        assert sliced.slices is not None
        share = sliced.slices.tokens[0] / sum(sliced.slices.tokens)

        def scaled(mine: PartCosts, theirs: PartCosts, those: PartCosts) -> PartCosts:
            forward, backward, weight = (
                own * new / old if old else new
                for own, new, old in zip(mine.times, those.times, theirs.times, strict=True)
            )
            return dataclasses.replace(
                mine,
                times=(forward, backward, weight),
                activation_bytes=share * mine.activation_bytes,
            )

        longer = sum(self.layer.times) / sum(whole.layer.times)
        more = tuple((longer * f, longer * b, longer * w) for f, b, w in sliced.slices.more)
        slices = dataclasses.replace(sliced.slices, more=more)
        return self._changed(scaled, whole, sliced, hop=share * self.hop, slices=slices)

    def costs(self, shape: Shape, layers: Sequence[int], seed: int | None = None) -> Costs:
        """Costs of an iteration; with the spread of task times when ``seed`` is given."""
        rng = random.Random(f"plan {seed}")
        sigma = 0.0 if seed is None else self.sigma

        def row(time: float) -> list[float]:
            if not sigma:
                return [time] * shape.num_microbatches
            draws = (rng.gauss(0.0, sigma) for _ in range(shape.num_microbatches))
            return [time * math.exp(draw - sigma * sigma / 2) for draw in draws]

        forward, backward, weight = (
            [
                self._sliced(row(time), count, kind)
                for time, count in zip(self.stage_times(layers, kind), layers, strict=True)
            ]
            for kind in Kind
        )
        hops = [Hop(self.hop / 2, self.hop / 2)] * (shape.num_stages - 1)
        overhead = dict.fromkeys(range(shape.num_ranks), self.between) if self.between else {}
        return Costs((forward, backward, weight), hops, overhead=overhead)

    def _sliced(self, times: list[float], layers: int, kind: Kind) -> list[float]:
        """The times of a stage's units, with what each slice takes more than the mean."""
        if self.slices is None:
            return times
        more = self.slices.more
        return [time + layers * more[i % len(more)][kind] for i, time in enumerate(times)]


def from_measured(measured: MeasuredCosts, layers: Sequence[int]) -> ModelCosts:
    """Solve for the parts of a model whose run had ``layers[s]`` layers on stage ``s``.

    Stages between the first and the last have layers only; the others' surplus is the embedding's
    and the head's.

    Raises:
        DataError: the stages do not fit: too few, another number, no times, or times that layers
        alone do not explain.
    """
    num_stages = len(measured.tasks)
    if len(layers) != num_stages:
        raise DataError(f"{len(layers)} layer counts for {num_stages} measured stages")
    inner = [s for s in range(1, num_stages - 1) if layers[s] > 0]
    if not inner:
        raise DataError(
            f"{num_stages} stages: at least one between the first and the last must have layers, "
            "or a layer cannot be told from the embedding and the head"
        )
    medians = [[_median(samples[kind]) for samples in measured.tasks] for kind in Kind]
    layer, first, last = [], [], []
    for kind in Kind:
        times = medians[kind]
        per_layer = sum(times[s] for s in inner) / sum(layers[s] for s in inner)
        _check_fit(kind, per_layer, [(s, layers[s], times[s]) for s in inner])
        layer.append(per_layer)
        first.append(max(0.0, times[0] - layers[0] * per_layer))
        last.append(max(0.0, times[-1] - layers[-1] * per_layer))
    each = sum(layer)
    if each <= 0.0:
        raise DataError("the run's layers take no time; a plan needs times above 0")
    for stage in (0, num_stages - 1):
        _check_end(stage, layers[stage], sum(times[stage] for times in medians), each)
    sizes = _part_sizes(measured, layers, inner)
    return ModelCosts(
        sum(layers),
        PartCosts(_times(layer), sizes[0]),
        PartCosts(_times(first), sizes[1]),
        PartCosts(_times(last), sizes[2]),
        hop=_median([sample for hop in measured.hops for sample in hop]),
        sigma=_spread(measured),
    )


def _check_fit(kind: Kind, per_layer: float, stages: Sequence[tuple[int, int, float]]) -> None:
    for stage, count, time in stages:
        expected = count * per_layer
        if abs(time - expected) > _MISFIT * max(expected, 1e-12):
            raise DataError(
                f"stage {stage}: its {kind.name} takes {time * 1e3:.3f} ms, but {count} layers of "
                f"{per_layer * 1e3:.3f} ms are {expected * 1e3:.3f} ms; the trace has a slow rank, "
                "or layers that are not alike, and a layout planned from it would be wrong"
            )


def _check_end(stage: int, count: int, time: float, each: float) -> None:
    """The first and the last stage have more than layers, so they cannot take less than these."""
    if time < (1 - _MISFIT) * count * each:
        raise DataError(
            f"stage {stage}: its tasks take {time * 1e3:.3f} ms, less than {count} layers of "
            f"{each * 1e3:.3f} ms: the run had another layout; --dpp-plan takes runs with the "
            "default layout alone, megatron-dpp plan --layers any"
        )


def _part_sizes(
    measured: MeasuredCosts, layers: Sequence[int], inner: Sequence[int]
) -> tuple[float, float, float]:
    sizes = measured.activation_bytes
    known = [s for s in inner if sizes[s] is not None]
    if not known:
        return 0.0, 0.0, 0.0
    layer = sum(sizes[s] or 0.0 for s in known) / sum(layers[s] for s in known)
    first = max(0.0, (sizes[0] or 0.0) - layers[0] * layer)
    last = max(0.0, (sizes[-1] or 0.0) - layers[-1] * layer)
    return layer, first, last


def _spread(measured: MeasuredCosts) -> float:
    """Spread of the logarithm of task times, by quartiles, so that a few outliers do not count."""
    logs = []
    for stage in measured.tasks:
        for samples in stage:
            middle = _median(samples)
            logs += [math.log(sample / middle) for sample in samples if sample > 0 and middle > 0]
    if len(logs) < 8:
        return 0.0
    quartiles = statistics.quantiles(logs, n=4)
    return (quartiles[2] - quartiles[0]) / 1.349


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else 0.0


def _times(values: Sequence[float]) -> Times:
    forward, backward, weight = values
    return forward, backward, weight
