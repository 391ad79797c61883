"""Mixtral: Mistral with experts in all layers."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family

_SPARSE = "block_sparse_moe"
_EXPERT = f"{_SPARSE}.experts.{{expert}}."

FAMILY = Family(
    name="mixtral",
    models="Mixtral 8x7B and 8x22B",
    class_name="MixtralForCausalLM",
    fields=parts.FIELDS | parts.EXPERT_FIELDS | {"num_local_experts": "num-experts"},
    rows=(
        *(*parts.ENDS, *parts.ATTENTION),
        *parts.experts(
            f"{_SPARSE}.gate.weight",
            *(f"{_EXPERT}{name}.weight" for name in ("w1", "w3", "w2")),
        ),
    ),
    flags=parts.FLAGS | parts.EXPERT_FLAGS,
    only=parts.EXPERT_ONLY | {"router_jitter_noise": (0.0, None)},
    usual=parts.EXPERT_USUAL | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
