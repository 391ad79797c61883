"""Families that cannot be trained here, each with the reason."""

LEFT_OUT = {
    "gemma2": "its attention caps logits by a tanh, which the local layers' kernels do not do; use "
    "Gemma 3",
}
"""``model_type`` -> the reason, as the end of a sentence."""
