"""Seed-OSS: Llama with biases of queries, keys and values, and a width of heads of its own."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="seed_oss",
    models="Seed-OSS 36B",
    class_name="SeedOssForCausalLM",
    fields=parts.FIELDS,
    rows=(*parts.LLAMA, *parts.QKV_BIAS),
    flags=parts.FLAGS | {"add-qkv-bias": True},
    only=parts.ONLY | {"attention_bias": (True,), "attention_out_bias": (False, None)},
    usual=parts.USUAL | {"num_key_value_heads": 8, "head_dim": 128},
)
