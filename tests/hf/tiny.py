"""Tiny random models of every family, made with transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron.dpp_train.hf.families import find_families

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LOCAL, _FULL = "sliding_attention", "full_attention"
_PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
_OLMO3 = {
    _LOCAL: _PLAIN,
    _FULL: {**_PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
_GEMMA3 = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
_GPT_OSS = {
    **_PLAIN,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
_GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "rope_parameters": _LLAMA3}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 4096}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SIZES,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_key_value_heads": 4}),
    "phi3": ("Phi3", {**SIZES, "partial_rotary_factor": 0.5, **_ENDS}),
    "smollm3": ("SmolLM3", {**SIZES, **_ENDS}),
    "seed_oss": ("SeedOss", {**SIZES, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            **SIZES,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        },
    ),
    "olmo2": ("Olmo2", SIZES),
    "olmo3": ("Olmo3", {**SIZES, "sliding_window": 5, "rope_parameters": _OLMO3}),
    "gemma3_text": (
        "Gemma3Text",
        {
            **SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": [_LOCAL, _LOCAL, _FULL, _LOCAL],
            "rope_parameters": _GEMMA3,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SIZES,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": _GPT_OSS,
        },
    ),
    "gpt2": ("GPT2", {**_GPT2, "bos_token_id": 0, "eos_token_id": 0}),
}
"""Family -> the start of transformers' class names, and its settings."""
SPARSE = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss")
"""Families with experts."""


def _config(family: str, **more: Any) -> Any:
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    start, settings = MODELS[family]
    plain = {"pad_token_id": None}  # a token of padding would have no gradient
    return getattr(transformers, f"{start}Config")(**plain | settings | more)


def config_of(family: str) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    found: dict[str, Any] = _config(family).to_dict()
    return found


def make(family: str, folder: Path, *, shard: str = "1GB", **more: Any) -> Path:
    """A model whose parameters are all drawn, norms and biases too."""
    import transformers

    config = _config(family, **more)
    torch.manual_seed(1)
    model = getattr(transformers, find_families()[family].class_name)(config)
    for name, parameter in model.named_parameters():
        scale = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(scale), std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load(folder: Path) -> Any:
    """The model in a folder, as transformers loads it."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The splitting rule of Llama 3. Qwen's differs in its digits alone."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def add_tokenizer(folder: Path, texts: list[str], size: int) -> None:
    """A tokenizer as Llama 3 has it, beside a model: at most ``size`` tokens learned from texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    made.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<|begin|>", "special": True},
        "eos_token": "<|end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
