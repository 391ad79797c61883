"""``config.json`` of a trained model."""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.families import Config, Family
from megatron.dpp_train.families.rotary import rotary_fields

_DESTINATIONS = {"norm-epsilon": "layernorm_epsilon"}
"""Flag -> its attribute, where that has another name."""


def write_config(family: Family, args: Any) -> Config:
    """The ``config.json`` of a model that was trained with ``args``. It says of the model what the
    family's fields can say.

    Raises:
        DataError: the family has experts and the model has none.
    """
    if "num-experts" in family.fields.values() and not args.num_experts:
        raise DataError(f"--family {family}: the model has no experts")
    content: Config = {"architectures": [family.class_name], "model_type": family.name}
    for key, flag in family.fields.items():
        value = getattr(args, _DESTINATIONS.get(flag, flag.replace("-", "_")))
        content[key] = value[0] if isinstance(value, list) else value
    if "num_key_value_heads" in content and not args.group_query_attention:
        content["num_key_value_heads"] = args.num_attention_heads
    content["tie_word_embeddings"] = not args.untie_embeddings_and_output_weights
    content |= {key: values[0] for key, values in family.only.items() if values[0] is not None}
    if "sliding_window" in family.usual:
        content["sliding_window"] = None
    if family.flags.get("position-embedding-type") == "rope":
        content |= rotary_fields(args)
    if "norm_topk_prob" in family.usual:
        content["norm_topk_prob"] = not args.moe_router_pre_softmax
    return content | family.write(args)
