"""Gemma 3, text alone: norms before and behind, a window in most layers, and a scaled embedding."""

from typing import Any

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family


def _prepare(content: Config) -> Config:
    return parts.rope_of_kinds(content, "rope_local_base_freq", 10000.0)


def _read(content: Config) -> dict[str, Any]:
    flags = parts.window_flags(content, content.get("sliding_window_pattern", 6))
    if flags:
        flags |= {"window-rotary-base": int(content["rope_local_base_freq"])}
    return flags | {
        "softmax-scale": content["query_pre_attn_scalar"] ** -0.5,
        "embedding-scale": content["hidden_size"] ** 0.5,
    }


def _write(args: Any) -> Config:
    return parts.window_fields(args) | {
        "query_pre_attn_scalar": round(args.softmax_scale**-2),
        "rope_local_base_freq": float(args.window_rotary_base or 10000),
    }


FAMILY = Family(
    name="gemma3_text",
    models="Gemma 3, text alone",
    class_name="Gemma3ForCausalLM",
    fields=parts.FIELDS,
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *parts.QK_NORM, *parts.gated_mlp()),
        *(parts.mlp_norm("pre_feedforward"), *parts.OUTPUT_NORMS),
    ),
    flags={
        "geglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "apply-layernorm-1p": True,
        "position-embedding-type": "rope",
        "qk-layernorm": True,
        "output-norms": True,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    usual=parts.USUAL
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    silent=("sliding_window_pattern", "_sliding_window_pattern"),
    prepare=_prepare,
    read=_read,
    write=_write,
)
