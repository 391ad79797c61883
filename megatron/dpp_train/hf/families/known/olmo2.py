"""OLMo 2: norms behind attention and MLP instead of before, and norms over all heads."""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Family, row
from megatron.dpp_train.hf.families.parts import HF, OURS

FAMILY = Family(
    name="olmo2",
    models="OLMo 2",
    class_name="Olmo2ForCausalLM",
    fields=parts.FIELDS,
    rows=(
        *(*parts.ENDS, parts.QKV, parts.OUTPUT, *parts.gated_mlp()),
        row(f"{OURS}self_attention.q_layernorm.weight", f"{HF}self_attn.q_norm.weight: queries"),
        row(f"{OURS}self_attention.k_layernorm.weight", f"{HF}self_attn.k_norm.weight: keys"),
        row(f"{OURS}self_attn_bda.norm.weight", f"{HF}post_attention_layernorm.weight: hidden"),
        row(f"{OURS}mlp_bda.norm.weight", f"{HF}post_feedforward_layernorm.weight: hidden"),
    ),
    flags=parts.FLAGS
    | {
        "no-input-norms": True,
        "output-norms": True,
        "qk-layernorm": True,
        "qk-norm-over-heads": True,
    },
    only={"hidden_act": ("silu",), "attention_bias": (False, None)},
    usual=parts.USUAL | {"rms_norm_eps": 1e-5},
)
