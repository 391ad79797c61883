"""Mistral 7B."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="mistral",
    models="Mistral 7B",
    class_name="MistralForCausalLM",
    fields=parts.FIELDS,
    rows=parts.LLAMA,
    flags=parts.FLAGS,
    only=parts.ONLY,
    usual=parts.USUAL | {"num_key_value_heads": 8, "sliding_window": 4096},
)
