"""A family of models: its ``config.json`` as flags of training, and its tensors as rows.

This module and those of ``known`` load neither PyTorch nor megatron-core, so that a command line
that names a model is checked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
"""The content of a ``config.json``."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and options of one model. ``head`` is the width of a head.

    Args:
        flags: all flags of the model, for rows that name one.
        sparse: True for each layer that holds experts; empty where all or none do.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    positions: int
    experts: int = 0
    expert_ffn: int = 0
    untied: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    sparse: tuple[bool, ...] = ()

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Width of all groups' keys; the values are as wide."""
        return self.groups * self.head

    @property
    def fused(self) -> int:
        """Width of queries, keys and values together."""
        return self.queries + 2 * self.keys

    def value(self, word: str) -> int:
        """The size of a word of a row: a field of this class, a flag, or a multiple like ``2*ffn``.

        >>> gpt2 = Sizes(layers=12, hidden=768, ffn=3072, heads=12, groups=12, head=64, vocab=50257,
        ...              positions=1024)
        >>> gpt2.value("2*ffn")
        6144
        """
        times, _, name = word.rpartition("*")
        found = getattr(self, name, None)
        return int(times or 1) * int(self.flags.get(name, 0) if found is None else found)


@dataclass(frozen=True)
class Row:
    """One tensor of a Megatron checkpoint.

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


def row(
    key: str,
    *parts: str,
    rule: str = "same",
    only: str = "",
    layers: str = "all",
    full: bool = False,
) -> Row:
    """A row whose parts are written ``NAME: SHAPE``.

    >>> row("output_layer.weight", "lm_head.weight: vocab hidden").shapes
    ('vocab hidden',)
    """
    pairs = [part.split(": ") for part in parts]
    return Row(
        key, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), rule, only, layers, full
    )


def _none(_: str, __: Sizes) -> str:
    return ""


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
        usual: field -> transformers' value for a file without it.
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
    unread: Callable[[str, Sizes], str] = _none
    written: Config = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name
