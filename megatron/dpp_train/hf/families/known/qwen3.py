"""Qwen3, dense: Llama with norms of each head's queries and keys."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="qwen3",
    models="Qwen3",
    class_name="Qwen3ForCausalLM",
    fields=parts.FIELDS,
    rows=(*parts.LLAMA, *parts.QK_NORM),
    flags=parts.FLAGS | {"qk-layernorm": True},
    only=parts.ONLY,
    usual=parts.USUAL | {"num_key_value_heads": 32, "head_dim": 128},
)
