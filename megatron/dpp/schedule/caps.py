"""Memory caps of a rank: the meaning of ``--dpp-activation-cap``.

The unit is the activation of one chunk for one microbatch of the largest size. A cap below the peak
of Megatron's own order on the rank (``I_r``) could stop the pipeline, so it is refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule.actions import Geometry
from megatron.dpp.schedule.budget import ROUNDING
from megatron.dpp.schedule.reference import peak_in_flight

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FLAG = "--dpp-activation-cap"


@dataclass(frozen=True)
class Cap:
    """The cap of one rank.

    Args:
        chunks: chunk activations; a fraction is possible, since a deferred ``W`` keeps one.
        text: a sentence for the log.
        needs_measuring: the cap was given in bytes and an activation's size is not known yet;
            ``chunks`` is the default cap until :func:`parse_cap` is called again with the size.
        by_order: it equals the peak of Megatron's own order on its worst rank.
    """

    chunks: float
    text: str
    needs_measuring: bool = False
    by_order: bool = False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Measurements of a rank's chunks in the first training step.

    Args:
        activation_bytes: bytes of one microbatch's activation in the rank's largest chunk.
        deferred_bytes: bytes of it that weight gradients keep from ``B`` to ``W``.
        head_room: memory of the LM head on the last rank, in chunk activations.
    """

    activation_bytes: float
    deferred_bytes: float
    head_room: float = 1.0

    @property
    def beta(self) -> float:
        """Share of an activation that ``B`` frees; ``W`` frees the rest."""
        if self.activation_bytes <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.deferred_bytes / self.activation_bytes))


def parse_cap(
    text: str, geometry: Geometry, bytes_per_chunk_activation: float | None = None
) -> Cap:
    """Read a cap (``auto``, ``megatron``, ``strict``, ``1.5p`` or ``20GiB``) for ``geometry``'s
    rank.

    Args:
        bytes_per_chunk_activation: measured bytes of one microbatch's activation in the largest
            chunk; only a cap in bytes needs it.

    Raises:
        ConfigError: ``text`` is none of these, or below what Megatron's own order needs.
    """
    word = text.strip()
    if word == "auto":
        word = "1.5p" if geometry.num_chunks == 1 else "megatron"
        cap = _named_cap(word, geometry)
        return dataclasses.replace(cap, text=f"{cap.text} (auto)")
    size = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]+)", word)
    if size and size[2].upper() in _UNITS:
        return _bytes_cap(word, geometry, _number(size[1], text), size, bytes_per_chunk_activation)
    return _named_cap(word, geometry)


def default_cap(geometry: Geometry) -> Cap:
    """The cap of ``--dpp-activation-cap auto``."""
    return parse_cap("auto", geometry)


def beside_head(cap: Cap, geometry: Geometry, memory: Memory | None = None) -> float:
    """The cap of a rank with a split backward, in chunk activations.

    On the last rank it leaves room for the LM head's logits and their gradient: for one activation,
    or as measured where ``cap`` follows Megatron's order. It stays one activation above what that
    order needs there, if ``cap`` allows: without it a step takes 1 to 13 % longer. Down to that cap
    the room costs under 1 % on four and more ranks (simulated).
    """
    if not geometry.is_last or geometry.num_ranks == 1:
        return cap.chunks
    room = math.ceil(memory.head_room) if memory is not None and cap.by_order else 1
    least = peak_in_flight(geometry)
    return max(cap.chunks - room, min(cap.chunks - 1, least + 1), least)


def head_room(chunk_bytes: Sequence[float], layers: Sequence[int]) -> float:
    """Memory of the LM head on the last rank, in activations of its largest other chunk: the bytes
    that the last chunk keeps beside its layers, twice (for the gradient). At least 1, and 1 where
    there is no other chunk.

    Args:
        chunk_bytes: of one microbatch's activation in each of the rank's chunks.
        layers: transformer layers of each chunk.
    """
    others = [(size, count) for size, count in zip(chunk_bytes[:-1], layers, strict=False) if size]
    if not others:
        return 1.0
    of_layers = layers[-1] * max(size / max(count, 1) for size, count in others)
    return max(1.0, 2 * (chunk_bytes[-1] - of_layers) / max(others)[0])


def times_p(chunks: float, geometry: Geometry) -> str:
    """The least cap like ``1.25p`` that holds ``chunks`` chunk activations.

    >>> times_p(4, Geometry(num_ranks=3, rank=0, num_chunks=4, num_microbatches=6))
    '0.34p'
    """
    return f"{math.ceil(100 * chunks / (geometry.num_ranks * geometry.num_chunks)) / 100:g}p"


def worst_peak(geometry: Geometry) -> int:
    """The peak of Megatron's order on its worst rank, rank 0 (``I0``), in chunk activations."""
    return peak_in_flight(dataclasses.replace(geometry, rank=0))


def _named_cap(word: str, geometry: Geometry) -> Cap:
    per_p = re.fullmatch(r"([0-9.]+)p", word)
    if word == "megatron":
        cap = _checked(worst_peak(geometry), geometry, "as Megatron's worst rank does")
        return dataclasses.replace(cap, by_order=True)
    if word == "strict":
        return _checked(peak_in_flight(geometry), geometry, "as in Megatron's own schedule")
    if per_p:
        chunks = _number(per_p[1], word) * geometry.num_ranks * geometry.num_chunks
        return _checked(chunks, geometry, f"{word} whole-model activations")
    raise ConfigError(
        f"{_FLAG} {word}: expected auto, megatron, strict, a multiple of the pipeline size like "
        "1.5p, or bytes like 20GiB"
    )


def _bytes_cap(
    word: str,
    geometry: Geometry,
    amount: float,
    size: re.Match[str],
    bytes_per_chunk_activation: float | None,
) -> Cap:
    if amount <= 0:
        raise ConfigError(f"{_FLAG} {word}: must be above 0")
    if bytes_per_chunk_activation is None:
        default = default_cap(geometry)
        text = f"{default.text}; {word} takes its place once an activation's size is measured"
        return Cap(default.chunks, text, needs_measuring=True)
    if bytes_per_chunk_activation <= 0:
        raise ConfigError(
            f"{_FLAG} {word}: a chunk's activation was measured as {bytes_per_chunk_activation} "
            "bytes (offloaded ones are not measured); give a multiple of the pipeline size"
        )
    chunks = amount * _UNITS[size[2].upper()] / bytes_per_chunk_activation
    each = f"{bytes_per_chunk_activation / (1 << 20):.1f} MiB"
    return _checked(chunks, geometry, f"{word} at {each} each")


def _number(digits: str, text: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ConfigError(f"{_FLAG} {text}: {digits!r} is not a number") from None


def _checked(chunks: float, geometry: Geometry, why: str) -> Cap:
    least = peak_in_flight(geometry)
    if chunks < least - ROUNDING:
        raise ConfigError(
            f"{_FLAG}: {why} is {chunks:g} chunk activations on pipeline rank {geometry.rank}, but "
            f"Megatron's own order needs {least} there; less could stop the pipeline. Give at "
            f"least {times_p(least, geometry)}, or strict"
        )
    return Cap(
        chunks, f"pipeline rank {geometry.rank} may hold {chunks:g} chunk activations ({why})"
    )
