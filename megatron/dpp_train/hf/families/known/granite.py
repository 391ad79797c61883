"""Granite 3: Llama with factors of embedding, attention, residual and logits."""

from typing import Any

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family


def _read(content: Config) -> dict[str, Any]:
    return {"logit-scale": 1.0 / content["logits_scaling"]}


def _write(args: Any) -> Config:
    return {"logits_scaling": 1.0 / args.logit_scale}


FAMILY = Family(
    name="granite",
    models="Granite 3, dense",
    class_name="GraniteForCausalLM",
    fields=parts.FIELDS
    | {
        "attention_multiplier": "softmax-scale",
        "embedding_multiplier": "embedding-scale",
        "residual_multiplier": "residual-scale",
    },
    rows=parts.LLAMA,
    flags=parts.FLAGS,
    only=parts.ONLY,
    usual=parts.USUAL
    | dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        1.0,
    ),
    silent=("logits_scaling",),
    read=_read,
    write=_write,
)
