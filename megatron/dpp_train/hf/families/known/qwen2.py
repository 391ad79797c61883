"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="qwen2",
    models="Qwen2 and 2.5",
    class_name="Qwen2ForCausalLM",
    fields=parts.FIELDS,
    rows=(*parts.LLAMA, *parts.QKV_BIAS),
    flags=parts.FLAGS | {"add-qkv-bias": True},
    only=parts.ONLY,
    usual=parts.USUAL | {"num_key_value_heads": 32},
)
