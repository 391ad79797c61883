"""GPT-2: learned positions, biases everywhere, weights that are stored turned."""

from megatron.dpp_train.hf.families.base import Family, row
from megatron.dpp_train.hf.families.parts import OURS

_GPT2 = "transformer.h.{layer}."
_LINEAR = {
    "self_attention.linear_qkv": ("attn.c_attn", "hidden fused", "fused", "_by_group"),
    "self_attention.linear_proj": ("attn.c_proj", "queries hidden", "hidden", ""),
    "mlp.linear_fc1": ("mlp.c_fc", "hidden ffn", "ffn", ""),
    "mlp.linear_fc2": ("mlp.c_proj", "ffn hidden", "hidden", ""),
}
"""Name of a linear layer here -> name there, shapes of weight and bias, end of the rule."""

FAMILY = Family(
    name="gpt2",
    models="GPT-2",
    class_name="GPT2LMHeadModel",
    fields={
        "n_layer": "num-layers",
        "n_embd": "hidden-size",
        "n_inner": "ffn-hidden-size",
        "n_head": "num-attention-heads",
        "vocab_size": "padded-vocab-size",
        "n_positions": "max-position-embeddings",
        "layer_norm_epsilon": "norm-epsilon",
        "initializer_range": "init-method-std",
    },
    rows=(
        row("embedding.word_embeddings.weight", "transformer.wte.weight: vocab hidden"),
        row("embedding.position_embeddings.weight", "transformer.wpe.weight: positions hidden"),
        row("output_layer.weight", "lm_head.weight: vocab hidden", only="untied"),
        *(
            row(f"{ours}{kind}", f"{theirs}.{kind}: hidden")
            for ours, theirs in (
                ("decoder.final_layernorm.", "transformer.ln_f"),
                (f"{OURS}self_attention.linear_qkv.layer_norm_", f"{_GPT2}ln_1"),
                (f"{OURS}mlp.linear_fc1.layer_norm_", f"{_GPT2}ln_2"),
            )
            for kind in ("weight", "bias")
        ),
        *(
            row(f"{OURS}{ours}.weight", f"{_GPT2}{name}.weight: {shape}", rule=f"turned{rule}")
            for ours, (name, shape, _, rule) in _LINEAR.items()
        ),
        *(
            row(f"{OURS}{ours}.bias", f"{_GPT2}{name}.bias: {out}", rule=f"same{rule}")
            for ours, (name, _, out, rule) in _LINEAR.items()
        ),
    ),
    flags={"tanh-gelu": True},
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    usual={
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
)
