"""``config.json`` of a trained model, and the comparison of one with the run that trained it."""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.models.fields import FAMILIES, LLAMA3, Config, HfConfig

_DESTINATIONS = {"norm-epsilon": "layernorm_epsilon"}
"""Flag -> its attribute, where that has another name."""
_TRAITS = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "position-embedding-type": "learned_absolute",
    "add-qkv-bias": False,
    "qk-layernorm": False,
}
"""Flag -> its default; families have other values."""
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("squared_relu", "quick_geglu", "apply_layernorm_1p", "layernorm_zero_centered_gamma"),
            *("rotary_interleaved", "multi_latent_attention", "qk_l2_norm", "no_rope_freq"),
            *("rotary_seq_len_interpolation_factor", "attention_output_gate", "window_size"),
            *("experimental_attention_variant", "softmax_scale", "activation_func_clamp_value"),
            *("apply_residual_connection_post_layernorm", "glu_linear_offset", "mtp_num_layers"),
            *("moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias"),
            *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_apply_probs_on_input", "moe_latent_size"),
        )
    ),
    "rotary_percent": 1.0,
    "softmax_type": "vanilla",
    "moe_router_score_function": "softmax",
    "moe_layer_freq": 1,
}
"""Attribute -> its default, which all families have; None stands for all that is off."""
_COMPARED = {
    **_TRAITS,
    **dict.fromkeys(("use-rope-scaling", "untie-embeddings-and-output-weights"), False),
    **dict.fromkeys(("num-attention-heads", "kv-channels", "norm-epsilon", "rotary-base")),
    "moe-router-topk": None,
    "moe-router-pre-softmax": False,
}
"""Flag that shapes of tensors do not hold -> its value where ``config.json`` has none; None stands
for any."""
ATTRIBUTES = (
    *(flag.replace("-", "_") for flag in _TRAITS),
    *("add_bias_linear", "num_experts", "moe_router_pre_softmax"),
    *("group_query_attention", "untie_embeddings_and_output_weights", "rotary_base"),
    *("use_rope_scaling", "rope_scaling_factor", "num_query_groups"),
)
"""Attributes of parsed flags that :func:`write_config` reads beside the mapped ones."""


def write_config(name: str, args: Any, dtype: str) -> Config:
    """The ``config.json`` of a model that was trained with ``args``.

    Args:
        name: its family.
        dtype: of its tensors, as PyTorch calls it.

    Raises:
        DataError: the model is not of that family.
    """
    if name not in FAMILIES:
        raise DataError(f"--family {name}: expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _check_family(name, args)
    content: Config = {"architectures": [family.class_name], "model_type": name}
    for key, flag in family.mapped.items():
        value = getattr(args, _attribute(flag))
        content[key] = value[0] if isinstance(value, list) else value
    if "num_key_value_heads" in content and not args.group_query_attention:
        content["num_key_value_heads"] = args.num_attention_heads
    content["tie_word_embeddings"] = not args.untie_embeddings_and_output_weights
    content |= {key: values[0] for key, values in family.only.items() if values[0] is not None}
    if "sliding_window" in family.usual:
        content["sliding_window"] = None
    if family.flags.get("position-embedding-type") == "rope":
        content["rope_theta"] = float(args.rotary_base)
        content["rope_scaling"] = None
        if args.use_rope_scaling:
            factor = {"factor": args.rope_scaling_factor}
            content["rope_scaling"] = {"rope_type": "llama3", **factor, **LLAMA3}
    if "norm_topk_prob" in family.usual:
        content["norm_topk_prob"] = not args.moe_router_pre_softmax
    content["torch_dtype"] = dtype
    return content


def check_run(config: HfConfig, args: Any, where: str) -> None:
    """Refuse a ``config.json`` that says another model than the run trained.

    Args:
        args: the run's arguments, as far as its checkpoint holds them.
        where: the file, for errors.

    Raises:
        DataError: a value differs.
    """
    heads = getattr(args, "num_attention_heads", None)
    pairs = [
        (flag, _value(args, flag), config.flags.get(flag, default))
        for flag, default in _COMPARED.items()
    ]
    grouped = getattr(args, "group_query_attention", False)
    groups = getattr(args, "num_query_groups", None) if grouped else heads
    pairs.append(("num-query-groups", groups, config.sizes.groups))
    if "use-rope-scaling" in config.flags:
        factors = getattr(args, "rope_scaling_factor", None), config.flags["rope-scaling-factor"]
        pairs.append(("rope-scaling-factor", *factors))
    for flag, here, there in pairs:
        if here is not None and there is not None and here != there:
            raise DataError(
                f"{where}: says --{flag} {there}, the run has {here}: name a folder with the run's "
                "value (--like DIR of megatron-dpp convert)"
            )
    _check_plain(config.family, args, where)


def _attribute(flag: str) -> str:
    return _DESTINATIONS.get(flag, flag.replace("-", "_"))


def _value(args: Any, flag: str) -> Any:
    """The value of a flag; biases of all linear layers imply those of queries, keys and values."""
    if flag == "add-qkv-bias" and getattr(args, "add_bias_linear", False):
        return False
    return getattr(args, _attribute(flag), None)


def _check_family(name: str, args: Any) -> None:
    """Refuse a model whose layers are not those of the family."""
    family = FAMILIES[name]
    for flag, usual in _TRAITS.items():
        here, there = _value(args, flag), family.flags.get(flag, usual)
        if here != there:
            raise DataError(f"--family {name}: the model has --{flag} {here}, {name} has {there}")
    if args.add_bias_linear == ("disable-bias-linear" in family.flags):
        raise DataError(f"--family {name}: the model's linear layers have other biases")
    if bool(args.num_experts) != ("num-experts" in family.mapped.values()):
        raise DataError(f"--family {name}: the model has {args.num_experts or 'no'} experts")
    if args.num_experts and args.moe_router_pre_softmax and "norm_topk_prob" not in family.usual:
        raise DataError(f"--family {name}: the model has --moe-router-pre-softmax, {name} has not")
    _check_plain(name, args, f"--family {name}")


def _check_plain(name: str, args: Any, where: str) -> None:
    """Refuse options that no family has."""
    for attribute, default in _PLAIN.items():
        here = getattr(args, attribute, default)
        same = [1] * len(here) == here if isinstance(here, list) else here == default
        if here and not same:
            flag = attribute.replace("_", "-")
            raise DataError(f"{where}: the model has --{flag} {here}, {name} has {default}")
