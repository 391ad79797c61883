"""Mixtral and Qwen3-MoE: experts in all layers."""

from megatron.dpp_train.hf.families import parts

_EXPERT = "block_sparse_moe.experts.{expert}."

MIXTRAL = parts.like_llama(
    "mixtral",
    "Mixtral 8x7B and 8x22B",
    "MixtralForCausalLM",
    fields=parts.EXPERT_FIELDS | {"num_local_experts": "num-experts"},
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *parts.expert_norms()),
        parts.router("block_sparse_moe.gate"),
        parts.in_layer(
            f"{parts.EXPERTS}.linear_fc1.weight",
            *(f"{_EXPERT}{name}.weight: expert_ffn hidden" for name in ("w1", "w3")),
            rule="stacked",
        ),
        parts.in_layer(
            f"{parts.EXPERTS}.linear_fc2.weight", f"{_EXPERT}w2.weight: hidden expert_ffn"
        ),
    ),
    flags=parts.EXPERT_FLAGS,
    only=parts.EXPERT_ONLY | {"router_jitter_noise": (0.0, None)},
    usual=parts.EXPERT_USUAL | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
QWEN3_MOE = parts.like_llama(
    "qwen3_moe",
    "Qwen3 with experts",
    "Qwen3MoeForCausalLM",
    fields=parts.EXPERT_FIELDS
    | {"num_experts": "num-experts", "moe_intermediate_size": "moe-ffn-hidden-size"},
    rows=(*parts.ENDS, *parts.ATTENTION, *parts.QK_NORM, *parts.experts()),
    flags=parts.EXPERT_FLAGS | {"qk-layernorm": True},
    only=parts.EXPERT_ONLY,
    usual=parts.EXPERT_USUAL | {"num_key_value_heads": 4, "norm_topk_prob": False},
)
