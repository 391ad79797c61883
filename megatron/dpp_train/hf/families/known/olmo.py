"""OLMo 2 and 3: norms behind attention and MLP instead of before, and norms over all heads. OLMo 3
has a window in three of four layers, whose rotary embedding is not scaled."""

from dataclasses import replace
from typing import Any

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config
from megatron.dpp_train.hf.families.parts import FULL, SLIDING
from megatron.dpp_train.hf.families.rotary import rotary_fields

OLMO2 = parts.like_llama(
    "olmo2",
    "OLMo 2",
    "Olmo2ForCausalLM",
    rows=(
        *(*parts.ENDS, parts.QKV, parts.OUTPUT, *parts.gated_mlp(), *parts.OUTPUT_NORMS),
        *parts.QK_NORM_OVER_HEADS,
    ),
    flags=dict.fromkeys(
        ("no-input-norms", "output-norms", "qk-layernorm", "qk-norm-over-heads"), True
    ),
    only={"hidden_act": ("silu",), "attention_bias": (False, None)},
    usual={"rms_norm_eps": 1e-5},
)


def _prepare(content: Config) -> Config:
    return parts.rope_of_kinds(content, "window_rotary_base", content.get("rope_theta", 500000.0))


def _read(content: Config) -> dict[str, Any]:
    flags = parts.window_flags(content, 4)
    base: Any = content.get("window_rotary_base", content["rope_theta"])
    return flags | ({"window-rotary-base": int(base)} if flags else {})


def _write(args: Any) -> Config:
    window = parts.window_fields(args)
    if args.window_rotary_base is None:
        return window
    full: Config = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    scaling = rotary_fields(args)["rope_scaling"]
    local = {"rope_type": "default", "rope_theta": float(args.window_rotary_base)}
    both = {FULL: full | (scaling or {}), SLIDING: local}
    return window | {"rope_parameters": both, "rope_scaling": None}


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    models="OLMo 3",
    class_name="Olmo3ForCausalLM",
    usual=OLMO2.usual | {"rope_theta": 500000.0, "sliding_window": 4096},
    silent=("window_rotary_base",),
    prepare=_prepare,
    read=_read,
    write=_write,
)
