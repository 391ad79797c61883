"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary embedding is not scaled."""

from dataclasses import replace
from typing import Any

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config
from megatron.dpp_train.hf.families.known import olmo2
from megatron.dpp_train.hf.families.parts import FULL, SLIDING
from megatron.dpp_train.hf.families.rotary import rotary_fields


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


FAMILY = replace(
    olmo2.FAMILY,
    name="olmo3",
    models="OLMo 3",
    class_name="Olmo3ForCausalLM",
    usual=olmo2.FAMILY.usual | {"rope_theta": 500000.0, "sliding_window": 4096},
    silent=("window_rotary_base",),
    prepare=_prepare,
    read=_read,
    write=_write,
)
