"""Rows, fields and flags that many families share.

A family with the names of Llama's tensors takes :data:`LLAMA` as it is, or the parts of it that it
has, and adds rows of its own.
"""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families.base import Config, Row, row

HF = "model.layers.{layer}."
"""Start of the names of a layer's tensors in most Hugging Face models."""
OURS = "decoder.layers."
"""Start of the names of a layer's tensors in a checkpoint."""

# --- tensors ---

ENDS = (
    row("embedding.word_embeddings.weight", "model.embed_tokens.weight: vocab hidden"),
    row("decoder.final_layernorm.weight", "model.norm.weight: hidden"),
    row("output_layer.weight", "lm_head.weight: vocab hidden", only="untied"),
)
INPUT_NORM = row(
    f"{OURS}self_attention.linear_qkv.layer_norm_weight", f"{HF}input_layernorm.weight: hidden"
)
OUTPUT = row(
    f"{OURS}self_attention.linear_proj.weight", f"{HF}self_attn.o_proj.weight: hidden queries"
)
QKV = row(
    f"{OURS}self_attention.linear_qkv.weight",
    f"{HF}self_attn.q_proj.weight: queries hidden",
    f"{HF}self_attn.k_proj.weight: keys hidden",
    f"{HF}self_attn.v_proj.weight: keys hidden",
    rule="by_group",
)
ATTENTION = (INPUT_NORM, QKV, OUTPUT)
QKV_BIAS = (
    row(
        f"{OURS}self_attention.linear_qkv.bias",
        f"{HF}self_attn.q_proj.bias: queries",
        f"{HF}self_attn.k_proj.bias: keys",
        f"{HF}self_attn.v_proj.bias: keys",
        rule="by_group",
    ),
)
QK_NORM = (
    row(f"{OURS}self_attention.q_layernorm.weight", f"{HF}self_attn.q_norm.weight: head"),
    row(f"{OURS}self_attention.k_layernorm.weight", f"{HF}self_attn.k_norm.weight: head"),
)


def mlp_norm(name: str, layers: str = "all") -> Row:
    """The norm before a dense MLP, by its name in a layer of Hugging Face's."""
    return row(f"{OURS}mlp.linear_fc1.layer_norm_weight", f"{HF}{name}: hidden", layers=layers)


def gated_mlp(layers: str = "all") -> tuple[Row, ...]:
    """The weights of a dense gated MLP."""
    return (
        row(
            f"{OURS}mlp.linear_fc1.weight",
            f"{HF}mlp.gate_proj.weight: ffn hidden",
            f"{HF}mlp.up_proj.weight: ffn hidden",
            rule="stacked",
            layers=layers,
        ),
        row(
            f"{OURS}mlp.linear_fc2.weight",
            f"{HF}mlp.down_proj.weight: hidden ffn",
            layers=layers,
        ),
    )


OUTPUT_NORMS = (
    row(f"{OURS}self_attn_bda.norm.weight", f"{HF}post_attention_layernorm.weight: hidden"),
    row(f"{OURS}mlp_bda.norm.weight", f"{HF}post_feedforward_layernorm.weight: hidden"),
)
"""Norms of what attention and MLP add."""
MLP_NORM = mlp_norm("post_attention_layernorm.weight")
MLP = (MLP_NORM, *gated_mlp())


def experts(router: str, gate: str, up: str, down: str, *, layers: str = "all") -> tuple[Row, ...]:
    """Rows of a layer's experts, by their names in a layer of Hugging Face's."""
    inner = f"{OURS}mlp.experts.experts."
    return (
        *expert_norms(layers),
        row(f"{OURS}mlp.router.weight", f"{HF}{router}: experts hidden", layers=layers),
        row(
            f"{inner}linear_fc1.weight",
            f"{HF}{gate}: expert_ffn hidden",
            f"{HF}{up}: expert_ffn hidden",
            rule="stacked",
            layers=layers,
        ),
        row(f"{inner}linear_fc2.weight", f"{HF}{down}: hidden expert_ffn", layers=layers),
    )


def expert_norms(layers: str = "all") -> tuple[Row, Row]:
    """The norm before experts. It has one name in local layers, and one in Transformer Engine's; a
    checkpoint holds both."""
    norm = f"{HF}post_attention_layernorm.weight: hidden"
    return (
        row(f"{OURS}mlp.linear_fc1.layer_norm_weight", norm, layers=layers),
        row(f"{OURS}pre_mlp_layernorm.weight", norm, layers=layers),
    )


QWEN_EXPERTS = tuple(
    f"mlp.{name}.weight"
    for name in (
        "gate",
        *(f"experts.{{expert}}.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    )
)
"""Names of a router and an expert in families that follow Qwen's."""
LLAMA = (*ENDS, *ATTENTION, *MLP)
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
EXPERT_USUAL = USUAL | {"router_aux_loss_coef": 0.001}

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
