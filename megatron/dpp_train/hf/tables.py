"""Tensors of a model: which of Hugging Face's become which of Megatron's.

A row of a family names a tensor of a Megatron checkpoint, the tensors of a Hugging Face model that
it is made of, their shapes, and the rule that joins them. :func:`entries` lists the tensors of one
model. Local layers and Transformer Engine's have the same names in a checkpoint, but for experts'
norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp_train.hf.families import Family, Row, Sizes
from megatron.dpp_train.hf.families.parts import OURS


class Part(NamedTuple):
    """One Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor of a Megatron checkpoint, of one layer and one expert where it has these.

    Args:
        key: its name in the checkpoint.
        place, counts: its index along the axes of layers and experts, and their lengths.
        shape: its own shape, behind those axes.
        parts: what it is made of.
        rule: how they are joined.
        twin: its values are those of an entry before; Hugging Face tensors are written once.
        by_vocab: its rows are those of the vocabulary, of which Megatron may hold more.
        full: no parameter, and kept in 32 bit.
    """

    key: str
    place: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rule: str
    twin: bool
    by_vocab: bool
    full: bool = False


def entries(family: Family, sizes: Sizes) -> Iterator[Entry]:
    """All tensors of a model: those outside of layers, then layer by layer."""
    rows = [row for row in family.rows if not row.only or sizes.value(row.only)]
    in_layers = [row for row in rows if "{layer}" in row.names[0]]
    for row in rows:
        if row not in in_layers:
            yield _entry(row, sizes, None, None, twin=False)
    for layer in range(sizes.layers):
        seen: set[tuple[str, ...]] = set()
        is_sparse = sizes.sparse[layer] if sizes.sparse else bool(sizes.experts)
        for row in in_layers:
            if row.layers in ("all", "sparse" if is_sparse else "dense"):
                several = range(sizes.experts) if "{expert}" in row.names[0] else (None,)
                for expert in several:
                    yield _entry(row, sizes, layer, expert, twin=row.names in seen)
                seen.add(row.names)


def _entry(row: Row, sizes: Sizes, layer: int | None, expert: int | None, *, twin: bool) -> Entry:
    """The entry of a row. Where layers differ, each has tensors of its own: megatron-core then puts
    the number of the layer into the name instead of an axis."""
    key, axes = row.key, []
    if sizes.sparse and layer is not None:
        key = key.replace(OURS, f"{OURS}{layer}.")
    elif layer is not None:
        axes.append((layer, sizes.layers))
    if expert is not None:
        axes.append((expert, sizes.experts))
    parts = tuple(
        Part(name.format(layer=layer, expert=expert), tuple(map(sizes.value, shape.split())))
        for name, shape in zip(row.names, row.shapes, strict=True)
    )
    shape = parts[0].shape
    if row.rule.startswith("turned"):
        shape = (*shape[:-2], shape[-1], shape[-2])
    elif len(parts) > 1:
        shape = (sum(each.shape[0] for each in parts), *shape[1:])
    return Entry(
        key=key,
        place=tuple(place for place, _ in axes),
        counts=tuple(count for _, count in axes),
        shape=shape,
        parts=parts,
        rule=row.rule,
        twin=twin,
        by_vocab=row.shapes[0].startswith("vocab"),
        full=row.full,
    )
