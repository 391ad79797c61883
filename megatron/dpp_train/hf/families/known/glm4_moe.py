"""GLM-4.5: dense layers first, then experts with a sigmoid router, a bias and a shared expert."""

import re
from dataclasses import replace
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Sizes


def _read(content: Config) -> dict[str, Any]:
    """The flags of layers with experts behind some dense ones, and of attention."""
    layers, dense = content["num_hidden_layers"], content["first_k_dense_replace"]
    groups, best = content["n_group"] or 1, content["topk_group"] or 1
    if not content["norm_topk_prob"]:
        raise DataError("norm_topk_prob is False; weights of experts have a sum of 1 here")
    flags: dict[str, Any] = {
        "moe-layer-freq": f"[{','.join(str(int(at >= dense)) for at in range(layers))}]",
        "moe-router-topk-scaling-factor": content["routed_scaling_factor"],
    }
    if dense == 0:
        del flags["moe-layer-freq"]
    if content["n_shared_experts"]:
        width = content["n_shared_experts"] * content["moe_intermediate_size"]
        flags["moe-shared-expert-intermediate-size"] = width
    if groups > 1:
        if content["num_experts_per_tok"] != 2 * best:
            raise DataError(
                f"num_experts_per_tok is {content['num_experts_per_tok']} with topk_group {best}; "
                "megatron-core knows two experts per group only"
            )
        flags |= {"moe-router-num-groups": groups, "moe-router-group-topk": best}
    if content["use_qk_norm"]:
        flags["qk-layernorm"] = True
    if content["attention_bias"]:
        flags["add-qkv-bias"] = True
    return flags


def _write(args: Any) -> Config:
    """The fields of :func:`_read`."""
    every = args.moe_layer_freq
    dense = every.count(0) if isinstance(every, list) else 0
    if isinstance(every, list) and every != [0] * dense + [1] * (args.num_layers - dense):
        raise DataError(f"--moe-layer-freq {every}: dense layers must come first")
    shared = args.moe_shared_expert_intermediate_size or 0
    return {
        "first_k_dense_replace": dense,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "n_shared_experts": shared // args.moe_ffn_hidden_size,
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
        "norm_topk_prob": True,
        "use_qk_norm": bool(args.qk_layernorm),
        "attention_bias": bool(args.add_qkv_bias),
    }


def _unread(name: str, sizes: Sizes) -> str:
    """The reason why a tensor of the layers behind the last is left out."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return "it predicts further tokens" if found and int(found[1]) >= sizes.layers else ""


_ROWS = (
    parts.in_layer(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias: experts",
        layers="sparse",
        full=True,
    ),
    *parts.gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared",
                     layers="sparse", only="shared"),
    *parts.experts("sparse"),
    parts.mlp_norm(layers="dense"),
    *parts.gated_mlp(layers="dense"),
)  # fmt: skip

FAMILY = parts.like_llama(
    "glm4_moe",
    "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    "Glm4MoeForCausalLM",
    fields={
        "n_routed_experts": "num-experts",
        "num_experts_per_tok": "moe-router-topk",
        "moe_intermediate_size": "moe-ffn-hidden-size",
        "partial_rotary_factor": "rotary-percent",
    },
    rows=(
        *(*parts.ENDS, *parts.ATTENTION, *_ROWS),
        *(replace(each, only="qk-layernorm") for each in parts.QK_NORM),
        *(replace(each, only="add-qkv-bias") for each in parts.QKV_BIAS),
    ),
    flags={
        "moe-router-load-balancing-type": "none",
        "moe-token-dispatcher-type": "alltoall",
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": 0.0,
        "moe-router-dtype": "fp32",
    },
    only={"hidden_act": ("silu",)},
    usual={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    prepare=parts.partial_rotary,
    read=_read,
    write=_write,
    unread=_unread,
    written={"num_nextn_predict_layers": 0},
)
