"""Llama, and families that differ from it by few flags, fields or names."""

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config
from megatron.dpp_train.hf.families.parts import like_llama

LLAMA = like_llama("llama", "Llama 2 and 3", "LlamaForCausalLM")
MISTRAL = like_llama(
    "mistral",
    "Mistral 7B",
    "MistralForCausalLM",
    usual={"num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = like_llama(
    "qwen2",
    "Qwen2 and 2.5",
    "Qwen2ForCausalLM",
    rows=(*parts.LLAMA, *parts.QKV_BIAS),
    flags={"add-qkv-bias": True},
    usual={"num_key_value_heads": 32},
)
QWEN3 = like_llama(
    "qwen3",
    "Qwen3",
    "Qwen3ForCausalLM",
    rows=(*parts.LLAMA, *parts.QK_NORM),
    flags={"qk-layernorm": True},
    usual={"num_key_value_heads": 32, "head_dim": 128},
)
SEED_OSS = like_llama(
    "seed_oss",
    "Seed-OSS 36B",
    "SeedOssForCausalLM",
    rows=QWEN2.rows,
    flags={"add-qkv-bias": True},
    only=parts.ONLY | {"attention_bias": (True,), "attention_out_bias": (False, None)},
    usual={"num_key_value_heads": 8, "head_dim": 128},
)

# --- Granite 3: factors of embedding, attention, residual and logits ---

_SCALES = {
    "attention_multiplier": "softmax-scale",
    "embedding_multiplier": "embedding-scale",
    "residual_multiplier": "residual-scale",
}
GRANITE = like_llama(
    "granite",
    "Granite 3, dense",
    "GraniteForCausalLM",
    fields=_SCALES,
    usual=dict.fromkeys((*_SCALES, "logits_scaling"), 1.0),
    read=lambda content: {"logit-scale": 1.0 / content["logits_scaling"]},
    write=lambda args: {"logits_scaling": 1.0 / args.logit_scale},
)

# --- Phi-3 and Phi-4: projections are fused, heads may be rotated in part ---

PHI3 = like_llama(
    "phi3",
    "Phi-3 (4k), Phi-4 14B",
    "Phi3ForCausalLM",
    fields={"partial_rotary_factor": "rotary-percent"},
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
    usual={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
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


SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    "SmolLM3ForCausalLM",
    usual={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    silent=("no_rope_layers", "no_rope_layer_interval"),
    read=_read_smollm3,
    write=_write_smollm3,
)
