"""``--use-checkpoint-args``: the model's shape from the checkpoint instead of the command line.

``preflight`` calls this before it checks anything. Names and precedence are Megatron-LM
core_v0.16.1's: sizes that the command line spells out win, the rest of the architecture is the
checkpoint's.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.train.checkpoint_files import Found, find_start

_UNLESS_GIVEN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads",
    "kv_channels", "max_position_embeddings", "padded_vocab_size", "ckpt_format",
)  # fmt: skip
_ALWAYS = (
    "num_query_groups", "group_query_attention", "position_embedding_type",
    "add_position_embedding", "use_rotary_position_embeddings", "rotary_base", "rotary_percent",
    "rotary_interleaved", "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu",
    "untie_embeddings_and_output_weights", "layernorm_zero_centered_gamma", "normalization",
    "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout", "num_experts",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax",
    "moe_grouped_gemm", "moe_shared_expert_intermediate_size", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "tokenizer_type",
)  # fmt: skip


def take_checkpoint_args(args: argparse.Namespace) -> None:
    """Put the checkpoint's values into ``args``, in place; nothing happens without the flag.

    Raises:
        ConfigError: there is no ``--load``.
        DataError: no checkpoint is there, or it holds no arguments.
    """
    if not args.use_checkpoint_args:
        return
    if not args.load and not args.pretrained_checkpoint:
        raise ConfigError("--use-checkpoint-args needs --load")
    found = find_start(args)
    if found is None:
        raise DataError(f"--load {args.load}: no checkpoint there (--use-checkpoint-args)")
    saved = _saved_args(found)
    for name in _ALWAYS + tuple(name for name in _UNLESS_GIVEN if name not in args.given):
        value = getattr(saved, name, None)
        if value is not None:
            setattr(args, name, value)


def _saved_args(found: Found) -> Any:
    import torch
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    if found.is_distributed:
        path = found.path / "common.pt"
    else:
        path = next(iter(sorted(found.path.glob("mp_rank_00*/model_optim_rng.pt"))), found.path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=path.suffix == ".pt")
    except Exception as error:  # a broken file raises anything
        raise DataError(f"{path}: unreadable ({error})") from error
    if "args" not in state:
        raise DataError(f"{path}: holds no arguments (--use-checkpoint-args)")
    return state["args"]
