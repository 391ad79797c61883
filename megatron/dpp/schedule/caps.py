"""Memory caps of a rank: the meaning of ``DppConfig.activation_cap``.

The unit is the activation of one chunk for one microbatch of the largest size. A cap below the peak
of Megatron's own order on the rank (``I_r``) could stop the pipeline, so it is refused.

Where microbatches are linked (``Geometry.groups``), as the slices of a sequence, a group counts as
one microbatch: a cap means the same bytes whether sequences are cut or not. Megatron's order of
slices needs other sizes then, of which :func:`sliced_allowance` takes care.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.schedule.actions import Geometry
from megatron.dpp.schedule.reference import (
    Reference,
    peak_in_flight,
    peak_size,
    reference_order,
    static_peak,
)

UNIT = 1 << 40
"""Size of a microbatch where sizes do not matter: fine enough for any share of an activation."""
ROUNDING = 1e-6
"""Tolerance of a cap in chunk activations: caps are products of fractions."""
WHOLE_UP_TO = 1.5
"""A sequence of up to so many slices' tokens is not cut."""
_SLICE_STEP = 64
"""A slice has a multiple of so many tokens, as kernels like it."""
_NUMBER = r"([0-9]*\.?[0-9]+)"
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class MemoryLimit:
    """A bound on what a rank holds, beside its cap.

    Args:
        cap: most that may be held, in chunk activations of the largest microbatch.
        weights: the activation of each chunk, in chunk activations; empty where all are 1.
        assumed: size of a microbatch whose size is not known; 0 for the largest.
        soft: Megatron's next forward may pass the limit while no weight gradient is deferred. Such
            a limit may be as low as one likes.
        deferred: weight gradients keep their share; otherwise ``B`` frees all.
        unlike: microbatches differ in size, as far as is known.
    """

    cap: float
    weights: tuple[float, ...] = ()
    assumed: int = 0
    soft: bool = False
    deferred: bool = True
    unlike: bool = False


@dataclass(frozen=True)
class Cap:
    """The cap of one rank.

    Args:
        chunks: chunk activations; a fraction is possible, since a deferred ``W`` keeps one.
        text: a sentence for the log.
        needs_measuring: the cap was given in bytes and an activation's size is not known yet;
            ``chunks`` is the default cap until :func:`parse_cap` is called again with the size.
        by_order: it equals the peak of Megatron's own order on its worst rank.
        as_static: beside it, what the static schedule would have held so far is a soft limit.
        exact: it was given in bytes, which no rank may exceed.
    """

    chunks: float
    text: str
    needs_measuring: bool = False
    by_order: bool = False
    as_static: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Allowance:
    """The cap of one rank, with the weights of its chunks and further limits.

    Args:
        chunks: the cap, in chunk activations.
        weights: the activation of each chunk, in chunk activations; empty where all are 1.
        limits: further bounds.
    """

    chunks: float
    weights: tuple[float, ...] = ()
    limits: tuple[MemoryLimit, ...] = ()

    def with_static(self, sizes: StaticSizes, largest: int) -> Allowance:
        """Adds the soft limit of what the static schedule would have held so far."""
        most = sizes.peak(self.weights) / largest
        limit = MemoryLimit(most, self.weights, sizes.mean, soft=True, unlike=sizes.unlike)
        return dataclasses.replace(self, limits=(*self.limits, limit))


def key_sizes(groups: Sequence[int], sizes: Sequence[int], kappa: float) -> dict[int, int]:
    """The memory of each group's keys, values and gradients, under its first microbatch, whose
    activation lives as long. Microbatches that are linked to no other keep none.

    Args:
        groups: as in :class:`Geometry`; empty for none.
        sizes: of the microbatches.
        kappa: what they hold, as a share of their microbatches' activations.
    """
    found: dict[int, int] = {}
    first = 0
    for number in groups if sizes else ():
        if number > 1:
            found[first] = math.ceil(kappa * sum(sizes[first : first + number]))
        first += number
    return found


def group_sizes(groups: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Sizes of the microbatches of :attr:`Geometry.uncut`: of each group."""
    left = iter(sizes)
    return [sum(itertools.islice(left, number)) for number in groups or (1,) * len(sizes)]


def slice_size(length: int, tokens: int, multiple: int = 1) -> int:
    """Tokens of each slice of a sequence but the last one; ``length`` where it is not cut.

    Slices have equal tokens. The last one has half of a slice at least, unless the others would
    have more than 1.5 times ``tokens`` then.

    Args:
        tokens: that a slice should have. Sequences of up to 1.5 times as many are not cut.
        multiple: of which every slice but the last is one.

    >>> slice_size(10000, 4096), slice_size(6000, 4096)
    (3392, 6000)
    """
    if length <= WHOLE_UP_TO * tokens:
        return length
    step = math.lcm(min(_SLICE_STEP, tokens), multiple)
    each = math.ceil(length / math.ceil(length / tokens) / step) * step
    while 0 < length % each < each / 2 and each + step <= WHOLE_UP_TO * tokens:
        each += step
    return min(each, length)


class StaticSizes:
    """The peaks of Megatron's own order over the batches so far, in sizes."""

    def __init__(self) -> None:
        self.mean = 0
        """Mean size of the last batch's microbatches, rounded up."""
        self.unlike = True
        """The last batch's microbatches differ in size; True before the first batch."""
        self._worst = 0
        self._own: dict[tuple[float, ...], int] = {}

    def add(self, geometry: Geometry, sizes: Sequence[int], weights: tuple[float, ...]) -> None:
        """Count a batch; ``weights`` are those of the rank's chunks. A group of linked microbatches
        counts as one.
        """
        geometry, sizes = geometry.uncut, group_sizes(geometry.groups, sizes)
        self.mean = -(-sum(sizes) // len(sizes))
        self.unlike = min(sizes) < max(sizes)
        self._worst = max(self._worst, static_peak(geometry, sizes))
        if weights:
            own = peak_size(reference_order(geometry), sizes, weights)
            self._own[weights] = max(self._own.get(weights, 0), own)

    def peak(self, weights: tuple[float, ...]) -> int:
        """The most on any rank, or on this one with the weights of its chunks."""
        return max(self._worst, self._own.get(weights, 0))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Measurements of a rank's chunks in the first training step.

    Args:
        activation_bytes: bytes of one microbatch's activation in the rank's largest chunk without
            the LM head.
        deferred_bytes: bytes of it that weight gradients keep from ``B`` to ``W``.
        head_room: memory of the LM head on the last rank, in chunk activations.
        last_layers: layers of the last rank's last chunk, likewise.
        slots: activations are kept in the slots of CUDA graphs, which are never freed.
        one_head: the LM head's memory is that of one microbatch at a time, as F runs its backward.
    """

    activation_bytes: float
    deferred_bytes: float
    head_room: float = 1.0
    last_layers: float = 1.0
    slots: bool = False
    one_head: bool = False

    @property
    def beta(self) -> float:
        """Share of an activation that ``B`` frees; ``W`` frees the rest."""
        if self.activation_bytes <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.deferred_bytes / self.activation_bytes))


def parse_cap(
    text: str,
    geometry: Geometry,
    bytes_per_chunk_activation: float | None = None,
    *,
    sized: bool = False,
) -> Cap:
    """Read a cap (``auto``, ``megatron``, ``static``, ``strict``, ``1.5p``, ``1.2seq`` or
    ``20GiB``) for ``geometry``'s rank.

    ``seq`` are activations of the longest microbatch in all chunks of the rank. It, and bytes, may
    be less than Megatron's order of uncut microbatches holds where they are linked.

    Args:
        bytes_per_chunk_activation: measured bytes of one microbatch's activation in the largest
            chunk; only a cap in bytes needs it.
        sized: sequences may be cut, so that sizes tell what Megatron's order needs, and not
            ``geometry`` (:func:`sliced_allowance`). It is so where microbatches are linked.

    Raises:
        ConfigError: ``text`` is none of these, or below what Megatron's own order needs.
    """
    word, least = text.strip(), 0 if sized or geometry.groups else peak_in_flight(geometry)
    if word == "auto":
        word = "1.5p" if geometry.num_chunks == 1 else "megatron"
        cap = _named_cap(word, geometry, least)
        return dataclasses.replace(cap, text=f"{cap.text} (auto)")
    size = re.fullmatch(_NUMBER + r"\s*([A-Za-z]+)", word)
    if size and size[2].upper() in _UNITS:
        amount = float(size[1])
        return _bytes_cap(word, geometry, least, amount, size, bytes_per_chunk_activation)
    return _named_cap(word, geometry, least)


def beside_head(cap: Cap, geometry: Geometry, memory: Memory | None = None) -> Allowance:
    """The allowance of a rank with a split backward.

    On the last rank the LM head's logits and their gradient count like activations of the last
    chunk, from its F to its B, or once if F runs their backward. The cap follows from the bytes
    that Megatron's own order holds on its worst rank, and is at least what that order needs on
    this one.
    """
    if not geometry.is_last or geometry.num_ranks == 1:
        return Allowance(cap.chunks)
    if memory is None or geometry.num_chunks == 1 or memory.slots:
        return _fewer_activations(cap, geometry, memory)
    one_head = memory.head_room if memory.one_head else 0.0
    last = memory.last_layers + memory.head_room - one_head
    weights = (*[1.0] * (geometry.num_chunks - 1), last)
    order, sizes = reference_order(geometry), [UNIT] * geometry.num_microbatches
    least = peak_size(order, sizes, weights) / UNIT
    return Allowance(max(cap.chunks - one_head, least), weights)


def sliced_allowance(
    cap: Cap,
    geometry: Geometry,
    sizes: Sequence[int],
    largest: int,
    kappa: float,
    weights: tuple[float, ...] = (),
) -> Allowance:
    """The allowance of a rank for one iteration where sequences may be cut: the cap, or what
    Megatron's order of these microbatches needs if that is more.

    Args:
        sizes: of the microbatches.
        largest: size of the largest microbatch of :attr:`Geometry.uncut`.
        kappa: as in :class:`Scheduler`.
        weights: of the rank's chunks.

    Raises:
        ConfigError: the order needs more than a cap in bytes.
    """
    keys = key_sizes(geometry.groups, sizes, kappa)
    held = [size + keys.get(unit, 0) for unit, size in enumerate(sizes)]
    least = peak_size(Reference.of(geometry).order, held, weights) / largest
    if cap.exact and least > cap.chunks + ROUNDING:
        activation_cap = setting("activation_cap")
        raise ConfigError(
            f"{cap.text}; the slices of this step need {least:.2f} there. Raise {activation_cap}, "
            "or cut into smaller slices",
            activation_cap,
        )
    return Allowance(max(cap.chunks, least), weights)


def _fewer_activations(cap: Cap, geometry: Geometry, memory: Memory | None) -> Allowance:
    """A lower cap for the LM head's sake, where its memory cannot be counted by microbatch: it is
    not known, or slots keep the memory of activations that are gone.

    It leaves room for one activation, or as measured where ``cap`` follows Megatron's order. The
    logits of as many microbatches may be kept as in Megatron's order.
    """
    room = math.ceil(memory.head_room) if memory is not None and cap.by_order else 1
    chunks = max(cap.chunks - max(room, 1), peak_in_flight(geometry))
    if memory is None or geometry.num_chunks == 1 or memory.one_head:
        return Allowance(chunks)
    of_head = (*[0.0] * (geometry.num_chunks - 1), 1.0)
    heads = peak_size(reference_order(geometry), [1] * geometry.num_microbatches, of_head)
    return Allowance(chunks, limits=(MemoryLimit(heads, of_head, deferred=False),))


class LastRank(NamedTuple):
    """Activations of the last rank's chunks, with the LM head apart.

    Args:
        activation_bytes: of the largest chunk but the last; of the last where there is no other.
        layers: the last chunk's layers, in such activations.
        head_room: the LM head's logits and their gradient, likewise.
    """

    activation_bytes: float
    layers: float = 1.0
    head_room: float = 1.0

    @classmethod
    def of(cls, chunk_bytes: Sequence[float], layers: Sequence[int]) -> LastRank:
        """Tells the head from the layers by the other chunks.

        Args:
            chunk_bytes: of one microbatch's activation in each of the rank's chunks.
            layers: transformer layers of each chunk.
        """
        others = [(n, count) for n, count in zip(chunk_bytes[:-1], layers, strict=False) if n]
        if not others:
            return cls(max(chunk_bytes, default=0.0))
        largest = max(others)[0]
        of_layers = layers[-1] * max(n / max(count, 1) for n, count in others)
        head = max(0.0, 2 * (chunk_bytes[-1] - of_layers))
        return cls(largest, of_layers / largest, head / largest)


def times_p(chunks: float, geometry: Geometry) -> str:
    """The least cap like ``1.25p`` that holds ``chunks`` chunk activations.

    >>> times_p(4, Geometry(num_ranks=3, rank=0, num_chunks=4, num_microbatches=6))
    '0.34p'
    """
    return f"{math.ceil(100 * chunks / (geometry.num_ranks * geometry.num_chunks)) / 100:g}p"


def worst_peak(geometry: Geometry) -> int:
    """The peak of Megatron's order on its worst rank, rank 0 (``I0``), in chunk activations."""
    return peak_in_flight(dataclasses.replace(geometry, rank=0).uncut)


def _named_cap(word: str, geometry: Geometry, least: int) -> Cap:
    per_p, per_sequence = (re.fullmatch(_NUMBER + unit, word) for unit in ("p", "seq"))
    if word == "megatron":
        cap = _checked(worst_peak(geometry), geometry, least, "as Megatron's worst rank does")
        return dataclasses.replace(cap, by_order=True)
    if word == "static":
        why = "as Megatron's worst rank does, and as its own schedule did so far"
        cap = _checked(worst_peak(geometry), geometry, least, why)
        return dataclasses.replace(cap, by_order=True, as_static=True)
    if word == "strict":
        why = "as in Megatron's own schedule"
        return _checked(peak_in_flight(geometry.uncut), geometry, least, why)
    if per_p:
        chunks = float(per_p[1]) * geometry.num_ranks * geometry.num_chunks
        return _checked(chunks, geometry, least, f"{word} whole-model activations")
    if per_sequence:
        chunks = float(per_sequence[1]) * geometry.num_chunks
        why = f"{per_sequence[1]} activations of the longest sequence"
        instead = f"{math.ceil(100 * least / geometry.num_chunks) / 100:g}seq"
        return _checked(chunks, geometry, least, why, instead)
    raise _wrong(
        word,
        "expected auto, megatron, static, strict, a multiple of the pipeline size like 1.5p, "
        "longest sequences like 1.2seq, or bytes like 20GiB",
    )


def _bytes_cap(
    word: str,
    geometry: Geometry,
    least: int,
    amount: float,
    size: re.Match[str],
    bytes_per_chunk_activation: float | None,
) -> Cap:
    if amount <= 0:
        raise _wrong(word, "must be above 0")
    if bytes_per_chunk_activation is None:
        default = parse_cap("auto", geometry)
        text = f"{default.text}; {word} takes its place once an activation's size is measured"
        return Cap(default.chunks, text, needs_measuring=True)
    if bytes_per_chunk_activation <= 0:
        raise _wrong(
            word,
            f"a chunk's activation was measured as {bytes_per_chunk_activation} bytes (offloaded "
            "ones are not measured); give a multiple of the pipeline size",
        )
    chunks = amount * _UNITS[size[2].upper()] / bytes_per_chunk_activation
    mib = bytes_per_chunk_activation / (1 << 20)
    instead = f"{math.ceil(mib * least)}MiB"
    why = f"{word} at {mib:.1f} MiB for each of the longest microbatch"
    return dataclasses.replace(_checked(chunks, geometry, least, why, instead), exact=True)


def _wrong(word: str, text: str) -> ConfigError:
    given = setting("activation_cap", word)
    return ConfigError(f"{given}: {text}", given)


def _checked(chunks: float, geometry: Geometry, least: int, why: str, instead: str = "") -> Cap:
    """A cap that holds ``least``; ``instead`` is what to give if this one does not."""
    if chunks < least - ROUNDING:
        activation_cap = setting("activation_cap")
        raise ConfigError(
            f"{activation_cap}: {why} is {chunks:g} chunk activations on pipeline rank "
            f"{geometry.rank}, but Megatron's own order needs {least} there; less could stop the "
            f"pipeline. Give at least {instead or times_p(least, geometry)}, or strict",
            activation_cap,
        )
    return Cap(
        chunks, f"pipeline rank {geometry.rank} may hold {chunks:g} chunk activations ({why})"
    )
