"""Rows, fields and flags that many families share.

A family with the names of Llama's tensors takes :data:`LLAMA` as it is, or the parts of it that it
has, and adds rows of its own.
"""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families.base import Config, Family, Row, row

HF = "model.layers.{layer}."
"""Start of the names of a layer's tensors in most Hugging Face models."""
OURS = "decoder.layers."
"""Start of the names of a layer's tensors in a checkpoint."""

# --- tensors ---


def in_layer(ours: str, *theirs: str, **how: Any) -> Row:
    """A row of each layer, by the names of its tensors within one."""
    return row(f"{OURS}{ours}", *(f"{HF}{each}" for each in theirs), **how)


ENDS = (
    row("embedding.word_embeddings.weight", "model.embed_tokens.weight: vocab hidden"),
    row("decoder.final_layernorm.weight", "model.norm.weight: hidden"),
    row("output_layer.weight", "lm_head.weight: vocab hidden", only="untied"),
)
INPUT_NORM = in_layer(
    "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight: hidden"
)
OUTPUT = in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight: hidden queries")
QKV, _BIAS = (
    in_layer(
        f"self_attention.linear_qkv.{kind}",
        *(f"self_attn.{name}_proj.{kind}: {size}{width}"
          for name, size in (("q", "queries"), ("k", "keys"), ("v", "keys"))),
        rule="by_group",
    )
    for kind, width in (("weight", " hidden"), ("bias", ""))
)  # fmt: skip
ATTENTION, QKV_BIAS = (INPUT_NORM, QKV, OUTPUT), (_BIAS,)
QK_NORM, QK_NORM_OVER_HEADS = (
    tuple(
        in_layer(f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight: {size}")
        for name, size in (("q", queries), ("k", keys))
    )
    for queries, keys in (("head", "head"), ("queries", "keys"))
)
OUTPUT_NORMS = (
    in_layer("self_attn_bda.norm.weight", "post_attention_layernorm.weight: hidden"),
    in_layer("mlp_bda.norm.weight", "post_feedforward_layernorm.weight: hidden"),
)
"""Norms of what attention and MLP add."""


def mlp_norm(name: str = "post_attention", layers: str = "all") -> Row:
    """The norm before a dense MLP, by its name in a layer of Hugging Face's."""
    theirs = f"{name}_layernorm.weight: hidden"
    return in_layer("mlp.linear_fc1.layer_norm_weight", theirs, layers=layers)


def gated_mlp(
    ours: str = "mlp", theirs: str = "mlp", width: str = "ffn", **how: Any
) -> tuple[Row, Row]:
    """The weights of a gated MLP, by the start of their names in a layer."""
    up = (f"{theirs}.{name}_proj.weight: {width} hidden" for name in ("gate", "up"))
    down = f"{theirs}.down_proj.weight: hidden {width}"
    return (
        in_layer(f"{ours}.linear_fc1.weight", *up, rule="stacked", **how),
        in_layer(f"{ours}.linear_fc2.weight", down, **how),
    )


def expert_norms(layers: str = "all") -> tuple[Row, Row]:
    """The norm before experts. It has one name in local layers, and one in Transformer Engine's; a
    checkpoint holds both."""
    theirs = "post_attention_layernorm.weight: hidden"
    return mlp_norm(layers=layers), in_layer("pre_mlp_layernorm.weight", theirs, layers=layers)


def router(name: str, layers: str = "all") -> Row:
    """The router of a layer's experts, by its name in a layer of Hugging Face's."""
    return in_layer("mlp.router.weight", f"{name}.weight: experts hidden", layers=layers)


EXPERTS = "mlp.experts.experts"
"""Start of the names of experts in a layer of ours."""


def experts(layers: str = "all") -> tuple[Row, ...]:
    """Rows of a layer's experts in families that follow Qwen's."""
    names = (EXPERTS, "mlp.experts.{expert}", "expert_ffn")
    return *expert_norms(layers), router("mlp.gate", layers), *gated_mlp(*names, layers=layers)


LLAMA = (*ENDS, *ATTENTION, mlp_norm(), *gated_mlp())
"""The tensors of Llama."""

# --- fields and flags ---

FIELDS = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_key_value_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "vocab_size": "padded-vocab-size",
    "max_position_embeddings": "max-position-embeddings",
    "rms_norm_eps": "norm-epsilon",
    "initializer_range": "init-method-std",
}
"""Fields of families that follow Llama."""
EXPERT_FIELDS = {
    "num_experts_per_tok": "moe-router-topk",
    "router_aux_loss_coef": "moe-aux-loss-coeff",
}
FLAGS: dict[str, Any] = {
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
}
"""Flags of families that follow Llama."""
EXPERT_FLAGS = {
    "moe-router-load-balancing-type": "aux_loss",
    "moe-token-dispatcher-type": "alltoall",
}
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "use_sliding_window": (False, None),
}
"""Fields of families that follow Llama which have one value here."""
EXPERT_ONLY = ONLY | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
USUAL: Config = {
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
"""Values of fields that a file may lack."""
EXPERT_USUAL = {"router_aux_loss_coef": 0.001}


def like_llama(name: str, models: str, class_name: str, **own: Any) -> Family:
    """A family that differs from Llama by the fields of :class:`Family` in ``own``; ``fields``,
    ``flags`` and ``usual`` are added to Llama's."""
    llama: dict[str, Any] = {"fields": FIELDS, "flags": FLAGS, "usual": USUAL}
    added = {part: table | own.pop(part, {}) for part, table in llama.items()}
    rest = {"rows": LLAMA, "only": ONLY} | own
    return Family(name=name, models=models, class_name=class_name, **added, **rest)


# --- what several families read ---


def window_flags(content: Config, every: int) -> dict[str, Any]:
    """The flags of a sliding window that the layers of ``layer_types`` have; none where no layer
    has one. Without that field all have it but each ``every``-th."""
    layers = content["num_hidden_layers"]
    kinds = content.get("layer_types") or [
        SLIDING if (layer + 1) % every else FULL for layer in range(layers)
    ]
    window, slides = content.get("sliding_window"), [int(kind == SLIDING) for kind in kinds]
    if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
        raise DataError(f"layer_types is {shown(kinds)}, expected {layers} of {SLIDING}, {FULL}")
    if not window or not any(slides):
        return {}
    return {
        "window-size": f"{window - 1},0",
        "window-attn-skip-freq": f"[{','.join(map(str, slides))}]",
    }


def window_fields(args: Any) -> Config:
    """The fields of :func:`window_flags`, from the arguments of a run."""
    if args.window_size is None:
        return {"sliding_window": None, "layer_types": [FULL] * args.num_layers}
    every = args.window_attn_skip_freq or [1] * args.num_layers
    if isinstance(every, int):
        every = [int((layer + 1) % every != 0) for layer in range(args.num_layers)]
    kinds = [SLIDING if slides else FULL for slides in every]
    return {"sliding_window": args.window_size[0] + 1, "layer_types": kinds}


SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of ``layer_types``."""


def rope_of_kinds(content: Config, field: str, base: float) -> Config:
    """``config.json`` with the ``rope_parameters`` of full attention alone, where it has some for
    each kind of layer; ``field`` is then the base of layers with a window, which is ``base`` where
    they name none."""
    rope = content.get("rope_parameters") or {}
    local = rope.get(SLIDING) if FULL in rope else None
    if not local:
        return dict(content)
    theta = local.get("rope_theta", base)
    if local.get("rope_type", "default") != "default" or not float(theta).is_integer():
        raise DataError(f"rope_parameters of {SLIDING} is {shown(local)}, expected a plain one")
    return content | {"rope_parameters": dict(rope[FULL]), field: theta}


def partial_rotary(content: Config) -> Config:
    """``config.json`` with the share of a head that is rotated outside of ``rope_parameters``."""
    rope = dict(content.get("rope_parameters") or {})
    share = rope.pop("partial_rotary_factor", None)
    content = dict(content)
    if share is not None:
        content |= {"partial_rotary_factor": share, "rope_parameters": rope}
    return content
