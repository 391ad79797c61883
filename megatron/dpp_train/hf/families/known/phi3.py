"""Phi-3 and Phi-4: Llama whose projections are fused, and whose heads may be rotated in part."""

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family, row
from megatron.dpp_train.hf.families.parts import HF, OURS


def _read(content: Config) -> dict[str, Any]:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise DataError(
            f"rope_type {shown(kind)} of phi3 is LongRoPE, which cannot be trained here"
        )
    return {}


FAMILY = Family(
    name="phi3",
    models="Phi-3 (4k), Phi-4 14B",
    class_name="Phi3ForCausalLM",
    fields=parts.FIELDS | {"partial_rotary_factor": "rotary-percent"},
    rows=(
        *(*parts.ENDS, parts.INPUT_NORM, parts.OUTPUT, parts.MLP_NORM),
        row(
            f"{OURS}self_attention.linear_qkv.weight",
            f"{HF}self_attn.qkv_proj.weight: fused hidden",
            rule="fused_by_group",
        ),
        row(f"{OURS}mlp.linear_fc1.weight", f"{HF}mlp.gate_up_proj.weight: 2*ffn hidden"),
        row(f"{OURS}mlp.linear_fc2.weight", f"{HF}mlp.down_proj.weight: hidden ffn"),
    ),
    flags=parts.FLAGS,
    only={"hidden_act": ("silu",), "attention_bias": (False, None)},
    usual=parts.USUAL | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    prepare=parts.partial_rotary,
    read=_read,
)
