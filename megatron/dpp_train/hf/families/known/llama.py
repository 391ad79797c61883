"""Llama, and families that differ from it by few flags, fields or names."""

from dataclasses import replace
from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family

LLAMA = Family(
    name="llama",
    models="Llama 2 and 3",
    class_name="LlamaForCausalLM",
    fields=parts.FIELDS,
    rows=parts.LLAMA,
    flags=parts.FLAGS,
    only=parts.ONLY,
    usual=parts.USUAL,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    models="Mistral 7B",
    class_name="MistralForCausalLM",
    usual=parts.USUAL | {"num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    models="Qwen2 and 2.5",
    class_name="Qwen2ForCausalLM",
    rows=(*parts.LLAMA, *parts.QKV_BIAS),
    flags=parts.FLAGS | {"add-qkv-bias": True},
    usual=parts.USUAL | {"num_key_value_heads": 32},
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    models="Qwen3",
    class_name="Qwen3ForCausalLM",
    rows=(*parts.LLAMA, *parts.QK_NORM),
    flags=parts.FLAGS | {"qk-layernorm": True},
    usual=parts.USUAL | {"num_key_value_heads": 32, "head_dim": 128},
)
SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    models="Seed-OSS 36B",
    class_name="SeedOssForCausalLM",
    only=parts.ONLY | {"attention_bias": (True,), "attention_out_bias": (False, None)},
    usual=parts.USUAL | {"num_key_value_heads": 8, "head_dim": 128},
)

# --- Granite 3: factors of embedding, attention, residual and logits ---

_SCALES = {
    "attention_multiplier": "softmax-scale",
    "embedding_multiplier": "embedding-scale",
    "residual_multiplier": "residual-scale",
}
GRANITE = replace(
    LLAMA,
    name="granite",
    models="Granite 3, dense",
    class_name="GraniteForCausalLM",
    fields=parts.FIELDS | _SCALES,
    usual=parts.USUAL | dict.fromkeys((*_SCALES, "logits_scaling"), 1.0),
    read=lambda content: {"logit-scale": 1.0 / content["logits_scaling"]},
    write=lambda args: {"logits_scaling": 1.0 / args.logit_scale},
)

# --- Phi-3 and Phi-4: projections are fused, heads may be rotated in part ---

PHI3 = replace(
    LLAMA,
    name="phi3",
    models="Phi-3 (4k), Phi-4 14B",
    class_name="Phi3ForCausalLM",
    fields=parts.FIELDS | {"partial_rotary_factor": "rotary-percent"},
    rows=(
        *(*parts.ENDS, parts.INPUT_NORM, parts.OUTPUT, parts.mlp_norm()),
        parts.in_layer(
            "self_attention.linear_qkv.weight",
            "self_attn.qkv_proj.weight: fused hidden",
            rule="same_by_group",
        ),
        parts.in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight: 2*ffn hidden"),
        parts.in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight: hidden ffn"),
    ),
    only={"hidden_act": ("silu",), "attention_bias": (False, None)},
    usual=parts.USUAL | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    prepare=parts.partial_rotary,
)

# --- SmolLM3: some layers have no rotary embedding ---


def _read_smollm3(content: Config) -> dict[str, Any]:
    layers, every = content["num_hidden_layers"], content.get("no_rope_layer_interval", 4)
    rotated = content.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise DataError(f"no_rope_layers is {shown(rotated)}, expected a 0 or 1 for each layer")
    if all(rotated):
        return {}
    return {"no-rope-freq": f"[{','.join(str(1 - each) for each in rotated)}]"}


def _write_smollm3(args: Any) -> Config:
    skipped = args.no_rope_freq or [0] * args.num_layers
    if isinstance(skipped, int):
        skipped = [int((layer + 1) % skipped == 0) for layer in range(args.num_layers)]
    return {"no_rope_layers": [1 - each for each in skipped]}


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    models="SmolLM3",
    class_name="SmolLM3ForCausalLM",
    usual=parts.USUAL
    | {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    silent=("no_rope_layers", "no_rope_layer_interval"),
    read=_read_smollm3,
    write=_write_smollm3,
)
