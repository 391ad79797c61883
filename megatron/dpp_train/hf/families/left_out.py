"""Families that cannot be trained here, each with the reason."""

_LINEAR = (
    "its linear attention (gated delta net) is experimental in megatron-core, and needs "
    "Transformer Engine's modules"
)
_LATENT = (
    "its multi-latent attention needs Transformer Engine's modules, and no family here maps their "
    "tensors"
)
_LOGITS = "it caps the logits of attention by a tanh, which no kernel of the local layers does"
_IMAGES = "it reads images, too; take the folder of its text model"

LEFT_OUT = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"), _LINEAR),
    "gemma2": _LOGITS,
    **dict.fromkeys(("gemma3", "llama4", "mllama", "qwen2_vl", "qwen3_vl"), _IMAGES),
}
"""``model_type`` -> the reason, as the end of a sentence."""
