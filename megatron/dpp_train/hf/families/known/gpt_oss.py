"""gpt-oss: experts with biases and a clamped gate, a learned logit per head, windows in every other
layer."""

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family, row
from megatron.dpp_train.hf.families.parts import HF, OURS

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
    if content["swiglu_alpha"] != 1.702:
        raise DataError(f"swiglu_alpha is {shown(content['swiglu_alpha'])}, expected 1.702")
    return parts.window_flags(content, 2)


_EXPERTS = f"{OURS}mlp.experts.experts."
_SAVED = f"{HF}mlp.experts."
FAMILY = Family(
    name="gpt_oss",
    models="gpt-oss 20B and 120B, in 16 bit",
    class_name="GptOssForCausalLM",
    fields=parts.FIELDS
    | parts.EXPERT_FIELDS
    | {"num_local_experts": "num-experts", "swiglu_limit": "activation-func-clamp-value"},
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *parts.QKV_BIAS),
        row(f"{OURS}self_attention.linear_proj.bias", f"{HF}self_attn.o_proj.bias: hidden"),
        row(f"{OURS}self_attention.core_attention.softmax_offset", f"{HF}self_attn.sinks: heads"),
        *parts.expert_norms(),
        row(f"{OURS}mlp.router.weight", f"{HF}mlp.router.weight: experts hidden"),
        row(f"{OURS}mlp.router.bias", f"{HF}mlp.router.bias: experts"),
        row(
            f"{_EXPERTS}linear_fc1.weight",
            f"{_SAVED}gate_up_proj: experts hidden 2*ffn",
            rule="turned_pairs",
        ),
        row(
            f"{_EXPERTS}linear_fc1.bias", f"{_SAVED}gate_up_proj_bias: experts 2*ffn", rule="pairs"
        ),
        row(
            f"{_EXPERTS}linear_fc2.weight", f"{_SAVED}down_proj: experts ffn hidden", rule="turned"
        ),
        row(f"{_EXPERTS}linear_fc2.bias", f"{_SAVED}down_proj_bias: experts hidden"),
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
    only={"hidden_act": ("silu",), "attention_bias": (True,)},
    usual=parts.EXPERT_USUAL
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    silent=("swiglu_alpha",),
    prepare=_prepare,
    read=_read,
    write=parts.window_fields,
)
