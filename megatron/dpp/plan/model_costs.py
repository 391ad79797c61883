"""What the parts of a model cost, so that layouts which were never run can be simulated.

A :class:`ModelCosts` says what a layer, the embedding and the head (with the loss) take. It comes
from measured stage times (:func:`from_measured`, which solves for the parts and refuses when they
do not explain the stages) or from the model's shapes alone (:func:`from_shapes`, which counts
floating point operations). Read by ``plan.py``.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.measured import MeasuredCosts

_MISFIT = 0.15
"""A stage whose time differs by more than this share from what its parts predict is not understood.
"""

Times = tuple[float, float, float]
"""Seconds of ``F``, ``B`` and ``W`` for one microbatch."""


@dataclass(frozen=True)
class Part:
    """A layer, the embedding or the head.

    Args:
        activation_bytes: what its forward keeps for its backward.
        state_bytes: its weights, gradients and optimizer state.
        deferred_bytes: what a layer's backward keeps for its weight gradients; None for as much as
            its activation. The embedding and the head defer nothing.
    """

    times: Times
    activation_bytes: float = 0.0
    state_bytes: float = 0.0
    deferred_bytes: float | None = None


@dataclass(frozen=True)
class ModelCosts:
    """A model's parts.

    Args:
        num_layers: of the transformer.
        layer: each of them.
        embedding: before the first layer.
        head: after the last layer: final norm, output layer, loss.
        hop: seconds between neighbouring stages.
        sigma: spread of task times (of their logarithm).
        between: seconds from the end of a rank's task to the next: what the host needs, copies of
            what is received and sent, hiccups.
        slot_layers: layers are replayed as CUDA graphs (docs/decisions/0008-graphs.md): an
            activation in flight has a slot with room for the rank's largest chunk and this many
            layers more. None: they are not.
    """

    num_layers: int
    layer: Part
    embedding: Part
    head: Part
    hop: float = 0.0
    sigma: float = 0.0
    between: float = 0.0
    slot_layers: float | None = None

    def stage_times(self, layers: Sequence[int], kind: Kind) -> list[float]:
        """Seconds of each stage's ``kind`` with ``layers[s]`` layers on stage ``s``."""
        times = [n * self.layer.times[kind] for n in layers]
        times[0] += self.embedding.times[kind]
        times[-1] += self.head.times[kind]
        return times

    def activation_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes of each stage's activation for one microbatch."""
        sizes = [n * self.layer.activation_bytes for n in layers]
        sizes[0] += self.embedding.activation_bytes
        sizes[-1] += self.head.activation_bytes
        return sizes

    def deferred_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes that each stage's deferred weight gradients keep for one microbatch."""
        each = self.layer.deferred_bytes
        return [n * (self.layer.activation_bytes if each is None else each) for n in layers]

    def slot_bytes(self, layers: Sequence[int]) -> float:
        """Bytes of each slot of a rank with so many layers on its stages."""
        assert self.slot_layers is not None
        return (
            (max(layers) + self.slot_layers) * self.layer.activation_bytes if any(layers) else 0.0
        )

    def lengthened(self, factor: float) -> ModelCosts:
        """All times ``factor`` as long."""

        def longer(part: Part) -> Part:
            forward, backward, weight = (factor * seconds for seconds in part.times)
            return dataclasses.replace(part, times=(forward, backward, weight))

        return dataclasses.replace(
            self,
            layer=longer(self.layer),
            embedding=longer(self.embedding),
            head=longer(self.head),
            hop=factor * self.hop,
            between=factor * self.between,
        )

    def without_layers(self) -> ModelCosts:
        """The same times, and of the activations what lies outside of slots."""
        layer = dataclasses.replace(self.layer, activation_bytes=0.0, deferred_bytes=0.0)
        return dataclasses.replace(self, layer=layer)

    def state_bytes(self, layers: Sequence[int], num_ranks: int) -> list[float]:
        """Bytes of each rank's weights, gradients and optimizer state."""
        sizes = [sum(layers[rank::num_ranks]) * self.layer.state_bytes for rank in range(num_ranks)]
        sizes[0] += self.embedding.state_bytes
        sizes[-1] += self.head.state_bytes
        return sizes

    def with_memory_of(self, other: ModelCosts) -> ModelCosts:
        """These times with the memory of ``other``; activations that were measured stay."""

        def joined(mine: Part, theirs: Part) -> Part:
            activation = mine.activation_bytes or theirs.activation_bytes
            return Part(mine.times, activation, theirs.state_bytes, mine.deferred_bytes)

        return dataclasses.replace(
            self,
            layer=joined(self.layer, other.layer),
            embedding=joined(self.embedding, other.embedding),
            head=joined(self.head, other.head),
        )

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
            [row(time) for time in self.stage_times(layers, kind)] for kind in Kind
        )
        hops = [Hop(self.hop / 2, self.hop / 2)] * (shape.num_stages - 1)
        overhead = dict.fromkeys(range(shape.num_ranks), self.between) if self.between else {}
        return Costs((forward, backward, weight), hops, overhead=overhead)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer, named as Megatron's flags name it.

    Args:
        flops: floating point operations per second that a GPU reaches in matrix products, here an
            H200. Layouts need the proportions only.
        bytes_per_second: memory bandwidth, which bounds the loss and what lies between products.
        fused_loss: ``--cross-entropy-loss-fusion``.
        collective_seconds, collective_bytes_per_second: what a tensor-parallel collective takes
            beside its bytes, and how fast these are.
        between_seconds: from the end of a task to the next, as on H200s with CUDA graphs.
        state_bytes_per_parameter: 18 for bf16 weights, fp32 gradients and Adam in fp32.
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    ffn_hidden_size: int | None = None
    swiglu: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    fused_loss: bool = False
    flops: float = 7.1e14
    bytes_per_second: float = 4.8e12
    link_bytes_per_second: float = 2e11
    collective_seconds: float = 4e-5
    collective_bytes_per_second: float = 3.4e11
    between_seconds: float = 1.2e-4
    state_bytes_per_parameter: float = 18.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "seq_length", "vocab_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")


def from_shapes(model: ModelShape, sigma: float = 0.0) -> ModelCosts:
    """Costs from floating point operations: 2 per weight and token for ``F``, as many each for
    ``B`` and ``W``.

    The core of attention has no weights: 2 operations forward, 4 in ``B``. A causal mask halves
    them. Nothing of tensor-parallel collectives is hidden. Activations are those of a layer without
    recompute, with flash attention, in 16 bits: 34 bytes per element (Korthikanti et al., "Reducing
    Activation Recomputation", 2022).
    """
    h, tokens = model.hidden_size, model.seq_length * model.micro_batch_size
    ffn = model.ffn_hidden_size or 4 * h
    weights = 4 * h * h + (3 if model.swiglu else 2) * h * ffn
    linear = 2 * weights * tokens / model.tensor_parallel / model.flops
    core = 2 * model.seq_length * h * tokens / model.tensor_parallel
    core_forward, core_backward = attention_times(core, model.flops)
    share = model.state_bytes_per_parameter / model.tensor_parallel
    kept = 34 * h * tokens / model.tensor_parallel
    forward, backward = between_products(kept, model.bytes_per_second)
    each = _collective(model)
    sums, sums_backward = collectives(model.tensor_parallel, model.sequence_parallel)
    forward, backward = forward + sums * each, backward + sums_backward * each
    layer = Part(
        (linear + core_forward + forward, linear + core_backward + backward, linear),
        activation_bytes=kept,
        state_bytes=weights * share,
    )
    table = model.vocab_size * h
    logits = model.vocab_size * tokens / model.tensor_parallel
    rates = model.flops, model.bytes_per_second
    times = head_times(table / model.tensor_parallel, tokens, logits, *rates, model.fused_loss)
    head = Part(times, 4 * logits, table * share)
    lookup = embedding_times(table / model.tensor_parallel, 4 * h * tokens, model.bytes_per_second)
    embedding = Part(lookup, 2 * h * tokens, table * share)
    hop = 2 * h * tokens / model.link_bytes_per_second
    between = model.between_seconds
    return ModelCosts(model.num_layers, layer, embedding, head, hop, sigma, between)


def collectives(tensor: int, sequence_parallel: bool) -> tuple[int, int]:
    """Tensor-parallel collectives of a layer's forward and backward.

    Sequence parallelism halves each sum, into gathering and scattering, and gathers the inputs of
    two linear layers once more, for their weight gradients.
    """
    if tensor == 1:
        return 0, 0
    return (4, 6) if sequence_parallel else (2, 2)


def _collective(model: ModelShape) -> float:
    """Seconds of one: to sum a hidden state in a ring the whole goes round twice, less a rank's
    own share; to gather or scatter it, once.
    """
    tensor = model.tensor_parallel
    once = 2 * model.hidden_size * model.seq_length * model.micro_batch_size * (tensor - 1) / tensor
    passes = 1 if model.sequence_parallel else 2
    return model.collective_seconds + passes * once / model.collective_bytes_per_second


def between_products(kept: float, bytes_per_second: float) -> tuple[float, float]:
    """What a layer's forward and backward take between matrix products: norms, biases, activation
    functions, sums.

    Passes over the bytes that a forward keeps, in kernels of their own: fitted to the 345M and 1.3B
    models and to traced tasks on H200s (docs/benchmarks/scaling-h200.md).
    """
    once = kept / bytes_per_second
    return 4.2 * once, 7.4 * once


def attention_times(operations: float, flops: float) -> tuple[float, float]:
    """The core of attention, whose forward does ``operations`` and whose backward twice as many:
    at two thirds and half of the rate of matrix products, as on H200s.
    """
    once = operations / flops
    return 1.5 * once, 4 * once


def head_times(
    parameters: float,
    tokens: float,
    logits: float,
    flops: float,
    bytes_per_second: float,
    fused_loss: bool = False,
) -> Times:
    """Output layer and loss of one microbatch. Its weight gradient is not deferred: ``B`` has it.

    The bytes are those of megatron-core's vocabulary-parallel cross entropy (a conversion, maximum,
    difference, exponential and sum in fp32, each a kernel), as H200s take them: 3.9 ms forward and
    3.2 ms backward for 4096 tokens of 50304 words at hidden size 2048, and with megatron-core's
    fusion (``--cross-entropy-loss-fusion``) 4.4 and 3.9 ms for 8192 tokens of 51200 words at 1024.
    """
    forward, backward = (36, 16) if fused_loss else (62, 14)
    product = 2 * parameters * tokens / flops
    adding = 10 * parameters / bytes_per_second
    return (
        product + forward * logits / bytes_per_second,
        2 * product + backward * logits / bytes_per_second + adding,
        0.0,
    )


def embedding_times(parameters: float, num_bytes: float, bytes_per_second: float) -> Times:
    """Looking ``num_bytes`` up; the gradient is as large as the table, whatever was looked up.

    Its bytes are fitted to two tables on H200s: 0.59 ms for 51200 words at hidden size 1024, 0.87
    for 50304 at 2048, 16 MiB looked up in both.
    """
    backward = 26 * parameters + 44 * num_bytes
    return num_bytes / bytes_per_second, backward / bytes_per_second, 0.0


def from_measured(measured: MeasuredCosts, layers: Sequence[int]) -> ModelCosts:
    """Solve for the parts from a run that had ``layers[s]`` layers on stage ``s``.

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
        raise DataError("the run's layers take no time; a plan from them would mean nothing")
    for stage in (0, num_stages - 1):
        _check_end(stage, layers[stage], sum(times[stage] for times in medians), each)
    sizes = _part_sizes(measured, layers, inner)
    return ModelCosts(
        sum(layers),
        Part(_times(layer), sizes[0]),
        Part(_times(first), sizes[1]),
        Part(_times(last), sizes[2]),
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
            f"{each * 1e3:.3f} ms: the run's layers did not lie so; --dpp-plan takes runs with the "
            "default layout, profiling/plan.py --layers others"
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
