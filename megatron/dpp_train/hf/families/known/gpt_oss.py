"""gpt-oss: experts with biases and a clamped gate, a learned logit per head, windows in every other
layer."""

from typing import Any

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _prepare(content: Config) -> Config:
    if content.get("rope_parameters") or content.get("rope_scaling"):
        return dict(content)
    return content | {"rope_parameters": _YARN}


def _read(content: Config) -> dict[str, Any]:
    return parts.window_flags(content, 2)


FAMILY = Family(
    name="gpt_oss",
    models="gpt-oss 20B and 120B, in 16 bit",
    class_name="GptOssForCausalLM",
    fields=parts.FIELDS
    | parts.EXPERT_FIELDS
    | {"num_local_experts": "num-experts", "swiglu_limit": "activation-func-clamp-value"},
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *parts.QKV_BIAS, *parts.expert_norms()),
        parts.in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias: hidden"),
        parts.in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks: heads"),
        parts.router("mlp.router"),
        parts.in_layer("mlp.router.bias", "mlp.router.bias: experts"),
        *(
            parts.in_layer(f"{parts.EXPERTS}.{ours}", f"mlp.experts.{theirs}", rule=rule)
            for ours, theirs, rule in (
                ("linear_fc1.weight", "gate_up_proj: experts hidden 2*ffn", "turned_pairs"),
                ("linear_fc1.bias", "gate_up_proj_bias: experts 2*ffn", "pairs"),
                ("linear_fc2.weight", "down_proj: experts ffn hidden", "turned"),
                ("linear_fc2.bias", "down_proj_bias: experts hidden", "same"),
            )
        ),
    ),
    flags={
        **parts.EXPERT_FLAGS,
        "quick-geglu": True,
        "glu-linear-offset": 1.0,
        "softmax-type": "learnable",
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "expert-tensor-parallel-size": 1,
    },
    only={"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    usual=parts.USUAL
    | parts.EXPERT_USUAL
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    prepare=_prepare,
    read=_read,
    write=parts.window_fields,
)
