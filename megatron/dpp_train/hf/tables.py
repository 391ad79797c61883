"""Tensors of model families: which of Hugging Face's become which of Megatron's, one table each.

A row names a tensor of a Megatron checkpoint, the tensors of a Hugging Face model that it is made
of, their shapes, and the rule that joins them. :func:`entries` lists the tensors of one model.
Local layers and Transformer Engine's have the same names in a checkpoint, but for experts' norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and options of one model. ``head`` is the width of a head."""

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


@dataclass(frozen=True)
class Row:
    """One tensor of a Megatron checkpoint.

    Args:
        key: its name, without the numbers of layers and experts.
        names: names of the Hugging Face tensors, with ``{layer}`` and ``{expert}``.
        shapes: their shapes, as words that are fields of :class:`Sizes`.
        rule: how they are joined; the names are those of ``convert.rules``.
        only: the row holds for models with this field of :class:`Sizes`.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    rule: str = "same"
    only: str = ""


def _row(key: str, *parts: str, rule: str = "same", only: str = "") -> Row:
    """A row whose parts are written ``NAME: SHAPE``."""
    pairs = [part.split(": ") for part in parts]
    return Row(key, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), rule, only)


_HF = "model.layers.{layer}."
_OURS = "decoder.layers."

_ENDS = (
    _row("embedding.word_embeddings.weight", "model.embed_tokens.weight: vocab hidden"),
    _row("decoder.final_layernorm.weight", "model.norm.weight: hidden"),
    _row("output_layer.weight", "lm_head.weight: vocab hidden", only="untied"),
)
_ATTENTION = (
    _row(
        f"{_OURS}self_attention.linear_qkv.layer_norm_weight",
        f"{_HF}input_layernorm.weight: hidden",
    ),
    _row(
        f"{_OURS}self_attention.linear_qkv.weight",
        f"{_HF}self_attn.q_proj.weight: queries hidden",
        f"{_HF}self_attn.k_proj.weight: keys hidden",
        f"{_HF}self_attn.v_proj.weight: keys hidden",
        rule="by_group",
    ),
    _row(
        f"{_OURS}self_attention.linear_proj.weight",
        f"{_HF}self_attn.o_proj.weight: hidden queries",
    ),
)
_QKV_BIAS = (
    _row(
        f"{_OURS}self_attention.linear_qkv.bias",
        f"{_HF}self_attn.q_proj.bias: queries",
        f"{_HF}self_attn.k_proj.bias: keys",
        f"{_HF}self_attn.v_proj.bias: keys",
        rule="by_group",
    ),
)
_QK_NORM = (
    _row(f"{_OURS}self_attention.q_layernorm.weight", f"{_HF}self_attn.q_norm.weight: head"),
    _row(f"{_OURS}self_attention.k_layernorm.weight", f"{_HF}self_attn.k_norm.weight: head"),
)
_MLP_NORM = _row(
    f"{_OURS}mlp.linear_fc1.layer_norm_weight", f"{_HF}post_attention_layernorm.weight: hidden"
)
_MLP = (
    _MLP_NORM,
    _row(
        f"{_OURS}mlp.linear_fc1.weight",
        f"{_HF}mlp.gate_proj.weight: ffn hidden",
        f"{_HF}mlp.up_proj.weight: ffn hidden",
        rule="stacked",
    ),
    _row(f"{_OURS}mlp.linear_fc2.weight", f"{_HF}mlp.down_proj.weight: hidden ffn"),
)


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Rows of a layer's experts. Their norm has one name in local layers, and one in Transformer
    Engine's; a checkpoint holds both."""
    experts = f"{_OURS}mlp.experts.experts."
    return (
        _MLP_NORM,
        _row(f"{_OURS}pre_mlp_layernorm.weight", f"{_HF}post_attention_layernorm.weight: hidden"),
        _row(f"{_OURS}mlp.router.weight", f"{_HF}{router}: experts hidden"),
        _row(
            f"{experts}linear_fc1.weight",
            f"{_HF}{gate}: expert_ffn hidden",
            f"{_HF}{up}: expert_ffn hidden",
            rule="stacked",
        ),
        _row(f"{experts}linear_fc2.weight", f"{_HF}{down}: hidden expert_ffn"),
    )


_MIXTRAL = "block_sparse_moe.experts.{expert}."
_QWEN = "mlp.experts.{expert}."
_GPT2 = "transformer.h.{layer}."
_LLAMA = (*_ENDS, *_ATTENTION, *_MLP)

TABLES: dict[str, tuple[Row, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": (*_LLAMA, *_QKV_BIAS),
    "qwen3": (*_LLAMA, *_QK_NORM),
    "qwen3_moe": (
        *(*_ENDS, *_ATTENTION, *_QK_NORM),
        *_experts(
            "mlp.gate.weight",
            f"{_QWEN}gate_proj.weight",
            f"{_QWEN}up_proj.weight",
            f"{_QWEN}down_proj.weight",
        ),
    ),
    "mixtral": (
        *(*_ENDS, *_ATTENTION),
        *_experts(
            "block_sparse_moe.gate.weight",
            f"{_MIXTRAL}w1.weight",
            f"{_MIXTRAL}w3.weight",
            f"{_MIXTRAL}w2.weight",
        ),
    ),
    "gpt2": (
        _row("embedding.word_embeddings.weight", "transformer.wte.weight: vocab hidden"),
        _row("embedding.position_embeddings.weight", "transformer.wpe.weight: positions hidden"),
        _row("decoder.final_layernorm.weight", "transformer.ln_f.weight: hidden"),
        _row("decoder.final_layernorm.bias", "transformer.ln_f.bias: hidden"),
        _row("output_layer.weight", "lm_head.weight: vocab hidden", only="untied"),
        *(
            _row(f"{_OURS}{norm}_{kind}", f"{_GPT2}{name}.{kind}: hidden")
            for norm, name in (
                ("self_attention.linear_qkv.layer_norm", "ln_1"),
                ("mlp.linear_fc1.layer_norm", "ln_2"),
            )
            for kind in ("weight", "bias")
        ),
        _row(
            f"{_OURS}self_attention.linear_qkv.weight",
            f"{_GPT2}attn.c_attn.weight: hidden fused",
            rule="turned_by_group",
        ),
        _row(
            f"{_OURS}self_attention.linear_qkv.bias",
            f"{_GPT2}attn.c_attn.bias: fused",
            rule="fused_by_group",
        ),
        *(
            row
            for ours, theirs, shape, out in (
                ("self_attention.linear_proj", "attn.c_proj", "queries hidden", "hidden"),
                ("mlp.linear_fc1", "mlp.c_fc", "hidden ffn", "ffn"),
                ("mlp.linear_fc2", "mlp.c_proj", "ffn hidden", "hidden"),
            )
            for row in (
                _row(f"{_OURS}{ours}.weight", f"{_GPT2}{theirs}.weight: {shape}", rule="turned"),
                _row(f"{_OURS}{ours}.bias", f"{_GPT2}{theirs}.bias: {out}"),
            )
        ),
    ),
}
"""Family -> its rows. The names are those of ``model_type`` in ``config.json``."""

IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of buffers in older files, which hold no parameter."""


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


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
    """

    key: str
    place: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rule: str
    twin: bool
    by_vocab: bool


def entries(family: str, sizes: Sizes) -> Iterator[Entry]:
    """All tensors of a model: those outside of layers, then layer by layer."""
    rows = [row for row in TABLES[family] if not row.only or getattr(sizes, row.only)]
    in_layers = [row for row in rows if "{layer}" in row.names[0]]
    for row in rows:
        if row not in in_layers:
            yield _entry(row, sizes, (), twin=False)
    for layer in range(sizes.layers):
        seen: set[tuple[str, ...]] = set()
        for row in in_layers:
            several = range(sizes.experts) if "{expert}" in row.names[0] else (None,)
            for expert in several:
                place = (layer,) if expert is None else (layer, expert)
                yield _entry(row, sizes, place, twin=row.names in seen)
            seen.add(row.names)


def _entry(row: Row, sizes: Sizes, place: tuple[int, ...], *, twin: bool) -> Entry:
    numbers = dict(zip(("layer", "expert"), place, strict=False))
    shapes = [tuple(getattr(sizes, word) for word in shape.split()) for shape in row.shapes]
    parts = tuple(
        Part(name.format(**numbers), shape) for name, shape in zip(row.names, shapes, strict=True)
    )
    shape = shapes[0]
    if row.rule.startswith("turned"):
        shape = shape[::-1]
    elif len(parts) > 1:
        shape = (sum(each[0] for each in shapes), *shape[1:])
    return Entry(
        key=row.key,
        place=place,
        counts=(sizes.layers, sizes.experts)[: len(place)],
        shape=shape,
        parts=parts,
        rule=row.rule,
        twin=twin,
        by_vocab=row.shapes[0].startswith("vocab"),
    )


def num_parameters(family: str, sizes: Sizes) -> int:
    """Parameters of a model.

    >>> gpt2 = Sizes(layers=12, hidden=768, ffn=3072, heads=12, groups=12, head=64, vocab=50257,
    ...              positions=1024)
    >>> num_parameters("gpt2", gpt2)
    124439808
    """
    return sum(math.prod(each.shape) for each in entries(family, sizes) if not each.twin)
