"""Arguments of a run as a checkpoint holds them, beside the ``config.json`` of a model."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf.families import Config, Family
from megatron.dpp_train.hf.families.rotary import rotary_fields
from megatron.dpp_train.hf.fields import HfConfig, located
from megatron.dpp_train.hf.forms import NAMES, parse_forms

_OTHER_NAMES = {
    "norm-epsilon": "layernorm_epsilon",
    "apply-layernorm-1p": "layernorm_zero_centered_gamma",
    "disable-bias-linear": "add_bias_linear",
    "no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
}
"""Flag -> attribute of Megatron's arguments, where that has another name."""
_OFF = ("disable-bias-linear", "no-yarn-correction-range-round-to-int")
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")),
    **dict.fromkeys(("kv_channels", "num_query_groups", "num_experts", "mtp_num_layers")),
    **dict.fromkeys(("swiglu", "quick_geglu", "squared_relu", "add_qkv_bias"), False),
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "layernorm_zero_centered_gamma"), False),
    **dict.fromkeys(("untie_embeddings_and_output_weights", "multi_latent_attention"), False),
    **dict.fromkeys(("group_query_attention", "apply_residual_connection_post_layernorm"), False),
    **dict.fromkeys(("window_size", "window_attn_skip_freq", "no_rope_freq"), None),
    **dict.fromkeys(("activation_func_clamp_value", "experimental_attention_variant"), None),
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "position_embedding_type": "learned_absolute",
}
"""What a model computes, by Megatron's attributes and defaults."""
_ROTARY: dict[str, Any] = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
}
_ROPE: dict[str, Any] = {"use_rope_scaling": False, "rope_scaling_factor": 8.0}
_YARN: dict[str, Any] = {
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": True,
}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), None),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), None),
    **dict.fromkeys(("moe_router_pre_softmax", "moe_router_enable_expert_bias"), False),
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
}


def attributes(config: HfConfig) -> dict[str, Any]:
    """The flags of a model as attributes of Megatron's arguments."""
    found: dict[str, Any] = {"hf_forms": str(config.forms) or None}
    for flag, value in config.flags.items():
        if flag not in NAMES:
            name = _OTHER_NAMES.get(flag, flag.replace("-", "_"))
            found[name] = False if flag in _OFF else _value(value)
    return found


def _value(value: Any) -> Any:
    """The value of a flag as Megatron's parser makes it; lists and tuples are written as text."""
    if isinstance(value, str) and (value[:1] == "[" or "," in value):
        return ast.literal_eval(value)
    return value


def completed(saved: Any) -> Any:
    """The arguments of a checkpoint, with Megatron's defaults for those that it lacks, and the
    forms of :mod:`megatron.dpp_train.hf.forms` one by one."""
    known = _SHAPE | _ROTARY | _ROPE | _YARN | _EXPERTS | {"hf_forms": None} | vars(saved)
    return argparse.Namespace(**known | dataclasses.asdict(parse_forms(known["hf_forms"])))


def check_same(saved: Any, config: HfConfig, source: str, where: str) -> None:
    """Refuse a ``config.json`` of another model than the run's.

    Args:
        saved: arguments of the run.
        source: the name of its checkpoint, for errors.
        where: the name of ``config``.

    Raises:
        DataError: naming all arguments that differ, each with both values.
    """
    here, there = _structure(vars(saved)), _structure(attributes(config))
    other = [
        f"{name} is {here.get(name)}, there {there.get(name)}"
        for name in sorted(here.keys() | there.keys())
        if not _equal(here.get(name), there.get(name))
    ]
    if other:
        raise DataError(
            f"{source}: the run's model is not that of {where}: {'; '.join(other)}; give the "
            "model's own folder (--like DIR)"
        )


def _structure(args: dict[str, Any]) -> dict[str, Any]:
    """The values that a model has: implied ones are filled in, idle ones left out."""
    kind = args.get("position_embedding_type")
    known = dict(_SHAPE)
    known |= _ROTARY if kind in ("rope", "yarn") else {}
    known |= _ROPE if kind == "rope" else {}
    known |= _YARN if kind == "yarn" else {}
    known |= _EXPERTS if args.get("num_experts") else {}
    values = {name: args.get(name, usual) for name, usual in known.items()}
    if not values.pop("group_query_attention"):
        values["num_query_groups"] = values["num_attention_heads"]
    if values["kv_channels"] is None and values["hidden_size"]:
        values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
    if "moe_ffn_hidden_size" in values:
        values["moe_ffn_hidden_size"] = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
    if not values.get("use_rope_scaling"):
        values.pop("rope_scaling_factor", None)
    if values["add_bias_linear"]:
        values.pop("add_qkv_bias")  # which biases everywhere imply
    values["hf_forms"] = str(dataclasses.replace(parse_forms(args.get("hf_forms")), tokens=None))
    return values


def _equal(here: Any, there: Any) -> bool:
    if isinstance(here, list) and not isinstance(there, list):
        return all(each == there for each in here)  # a value for each layer
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-9)
    if isinstance(here, list | tuple) and isinstance(there, list | tuple):
        return list(here) == list(there)
    return bool(here == there) or (not here and not there)


def write_config(family: Family, args: Any) -> Config:
    """The ``config.json`` of a model that was trained with ``args``, which
    :func:`completed` gave. It says of the model what the family's fields can say.

    Raises:
        DataError: the family has experts and the model has none.
    """
    if "num-experts" in family.fields.values() and not args.num_experts:
        raise DataError(f"--family {family}: the model has no experts")
    content: Config = {"architectures": [family.class_name], "model_type": family.name}
    for key, flag in family.fields.items():
        name = _OTHER_NAMES.get(flag, flag.replace("-", "_"))
        value = getattr(args, name, family.usual.get(key))
        content[key] = value[0] if isinstance(value, list) else value
    if args.tokens is not None:
        content["vocab_size"] = args.tokens
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
    with located(f"--family {family}"):
        return content | family.write(args)
