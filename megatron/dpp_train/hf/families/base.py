"""A family of models: its ``config.json`` as flags of training, and its tensors as rows.

This module and those of ``known`` load neither PyTorch nor megatron-core, so that a command line
that names a model is checked at once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
"""The content of a ``config.json``."""


class Sizes:
    """Sizes of one model.

    Args:
        flags: all flags of the model, without dashes in front.

    Attributes:
        head, shared: widths of a head, and of the experts that all tokens share.
        queries, keys, fused: widths of all heads' queries, of all groups' keys (the values are as
            wide), and of the three together.
        sparse: True for each layer that holds experts; empty where all or none do.
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.flags = flags
        self.layers: int = flags["num-layers"]
        self.hidden: int = flags["hidden-size"]
        self.ffn: int = flags["ffn-hidden-size"]
        self.heads: int = flags["num-attention-heads"]
        self.groups: int = flags.get("num-query-groups", self.heads)
        self.head: int = flags.get("kv-channels", self.hidden // self.heads)
        self.queries, self.keys = self.heads * self.head, self.groups * self.head
        self.fused = self.queries + 2 * self.keys
        self.vocab: int = flags["padded-vocab-size"]
        self.positions: int = flags["max-position-embeddings"]
        self.experts: int = flags.get("num-experts", 0)
        self.expert_ffn: int = flags.get("moe-ffn-hidden-size", self.ffn)
        self.shared: int = flags.get("moe-shared-expert-intermediate-size", 0)
        self.untied = "untie-embeddings-and-output-weights" in flags
        every = ast.literal_eval(str(flags.get("moe-layer-freq", 1)))
        if isinstance(every, int):
            every = [layer % every == 0 for layer in range(self.layers)] if every > 1 else []
        self.sparse = tuple(map(bool, every))

    def value(self, word: str) -> int:
        """The size of a word of a row: an attribute, a flag, or a multiple like ``2*ffn``."""
        times, _, name = word.rpartition("*")
        found = getattr(self, name, None)
        return int(times or 1) * int(self.flags.get(name, 0) if found is None else found)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of a Megatron checkpoint, as :func:`row` makes it.

    Args:
        key: its name, without the numbers of layers and experts.
        names: names of the Hugging Face tensors, with ``{layer}`` and ``{expert}``.
        shapes: their shapes, as words of :meth:`Sizes.value`.
        rule: how they are joined; the names are those of ``hf.rules``.
        only: the row holds for models whose value of this word is not 0.
        layers: layers that have it: ``all``, those with experts (``sparse``), or the others
            (``dense``).
        full: no parameter, and kept in 32 bit whatever the type of the others.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    rule: str = "same"
    only: str = ""
    layers: str = "all"
    full: bool = False


def row(key: str, *parts: str, **how: Any) -> Row:
    """A :class:`Row` whose parts are written ``NAME: SHAPE``.

    >>> row("output_layer.weight", "lm_head.weight: vocab hidden").shapes
    ('vocab hidden',)
    """
    names, shapes = zip(*(part.split(": ") for part in parts), strict=True)
    return Row(key=key, names=names, shapes=shapes, **how)


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Args:
        name: its ``model_type`` in ``config.json``.
        models: models that people know, for the table of families.
        class_name: the class of transformers.
        fields: field of ``config.json`` -> flag without dashes. A field whose ``usual`` value is a
            float holds a number, any other one a whole number above 0.
        rows: its tensors.
        flags: Megatron's flags and forms (``--hf-forms``) that all its models have; True for a
            switch.
        only: field -> the values that can be trained; the first is that of a file without it.
        usual: field -> transformers' value for a file without it, of ``fields`` and of those that
            ``read`` knows.
        silent: further fields that ``read`` knows, or that say nothing about training.
        prepare: gives a ``config.json`` in the form that the tables read.
        read: further flags, from the fields of a file and the usual values of those that it lacks.
            It raises DataError for a value that cannot be trained.
        write: the fields that ``read`` reads, from the arguments of a run.
        unread: for the name of a tensor that is left out of a checkpoint, the reason; else empty.
        written: fields of each ``config.json`` that is written, whatever the model began with.
    """

    name: str
    models: str
    class_name: str
    fields: dict[str, str]
    rows: tuple[Row, ...]
    flags: dict[str, Any] = field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    prepare: Callable[[Config], Config] = dict
    read: Callable[[Config], dict[str, Any]] = _nothing
    write: Callable[[Any], Config] = _nothing
    unread: Callable[[str, Sizes], str] = lambda name, sizes: ""
    written: Config = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name
