"""Llama 2 and 3."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

FAMILY = Family(
    name="llama",
    models="Llama 2 and 3",
    class_name="LlamaForCausalLM",
    fields=parts.FIELDS,
    rows=parts.LLAMA,
    flags=parts.FLAGS,
    only=parts.ONLY,
    usual=parts.USUAL,
)
