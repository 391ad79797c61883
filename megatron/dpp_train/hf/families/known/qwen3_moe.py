"""Qwen3 with experts in all layers."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="qwen3_moe",
    models="Qwen3 with experts",
    class_name="Qwen3MoeForCausalLM",
    fields=parts.FIELDS
    | parts.EXPERT_FIELDS
    | {"num_experts": "num-experts", "moe_intermediate_size": "moe-ffn-hidden-size"},
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *parts.QK_NORM),
        *parts.experts(*parts.QWEN_EXPERTS),
    ),
    flags=parts.FLAGS | parts.EXPERT_FLAGS | {"qk-layernorm": True},
    only=parts.EXPERT_ONLY,
    usual=parts.EXPERT_USUAL | {"num_key_value_heads": 4, "norm_topk_prob": False},
)
