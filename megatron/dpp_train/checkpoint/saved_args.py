"""Arguments that a checkpoint holds: adopted with ``--use-checkpoint-args``, else compared.

``preflight`` calls :func:`take_checkpoint_args` before it checks anything. Precedence is
Megatron-LM core_v0.16.1's: sizes on the command line win, the rest of the architecture is the
checkpoint's. ``files`` and ``loader`` compare.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.naming import flag_name
from megatron.dpp_train.checkpoint.files import Found, find_start
from megatron.dpp_train.checkpoint.reader import read_archive
from megatron.dpp_train.options.run_config import Settings

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
_UNLESS_GIVEN = (
    *SIZES, "seq_length", "max_position_embeddings", "padded_vocab_size", "ckpt_format",
)  # fmt: skip
STRUCTURE = (
    "family", "num_query_groups", "group_query_attention", "position_embedding_type", "rotary_base",
    "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
    "use_rope_scaling", "rope_scaling_factor", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "no_rope_freq", "add_bias_linear", "add_qkv_bias",
    "geglu", "output_norms", "input_norms", "qk_norm_over_heads", "embedding_scale",
    "residual_scale", "logit_scale", "window_rotary_base",
    "qk_layernorm", "qk_l2_norm", "squared_relu", "quick_geglu", "swiglu", "glu_linear_offset",
    "activation_func_clamp_value", "untie_embeddings_and_output_weights", "softmax_type",
    "softmax_scale", "window_size", "window_attn_skip_freq", "attention_output_gate",
    "multi_latent_attention", "layernorm_zero_centered_gamma", "layernorm_epsilon",
    "normalization", "apply_residual_connection_post_layernorm", "num_experts", "moe_layer_freq",
    "moe_ffn_hidden_size", "moe_latent_size", "moe_router_topk", "moe_router_pre_softmax",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_apply_probs_on_input",
)  # fmt: skip
"""Attributes that say what a model of given sizes computes."""
_ALWAYS = (
    *STRUCTURE, "add_position_embedding", "use_rotary_position_embeddings",
    "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout", "moe_grouped_gemm",
    "tokenizer_type", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "rope_type",
)  # fmt: skip


def take_checkpoint_args(args: Settings) -> None:
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
    saved = _required_args(found)
    for name in _ALWAYS + tuple(name for name in _UNLESS_GIVEN if name not in args.given):
        value = getattr(saved, name, None)
        if value is not None:
            setattr(args, name, value)


def saved_args(found: Found) -> Any:
    """The arguments of the run that saved ``found``, with files named from the root; None where
    the file cannot be read or holds none.

    Raises:
        DataError: the file asks for a class or function that is not run.
    """
    try:
        return _placed(read_archive(_file_of(found)).get("args"))
    except DataError:
        raise
    except Exception:  # a broken file raises anything; loading it reports that
        return None


def _required_args(found: Found) -> Any:
    path = _file_of(found)
    try:
        state = read_archive(path)
    except DataError:
        raise
    except Exception as error:  # a broken file raises anything
        raise DataError(f"{path}: unreadable ({error})") from error
    if "args" not in state:
        raise DataError(f"{path}: holds no arguments (--use-checkpoint-args)")
    return state["args"]


def _file_of(found: Found) -> Path:
    """The file of ``found`` that holds the arguments."""
    ranks = sorted(found.path.glob("mp_rank_00*/model_optim_rng.pt"))
    return found.path / "common.pt" if found.is_distributed or not ranks else ranks[0]


def check_model(args: Settings, saved: Any, path: Path) -> None:
    """Refuse another model than the one saved; raises :class:`DataError`."""
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "tokenizer_type",
    ):
        there, here = getattr(saved, name, None), getattr(args, name)
        if there is not None and there != here:
            flag = flag_name(name)
            raise DataError(
                f"{path} was saved with {flag} {there}, this run has {here}: give the model's "
                "flags as they were, or --use-checkpoint-args"
            )


def check_tokens_kept(args: Settings, tokenizer: Any) -> None:
    """Refuse to go on with another tokenizer than that of the run that saved (DataError): ids would
    mean other tokens to the model than it has learned."""
    found = find_start(args)
    if found is None or found.pretrained or found.is_deepspeed or args.finetune:
        return
    saved = saved_args(found)
    if saved is None or tokenizer.keeps(getattr(saved, "tokenizer_tokens", None)):
        return
    names = ("tokenizer_model", "vocab_file", "merge_file")
    files = [(flag_name(name), getattr(saved, name, None)) for name in names]
    was = " ".join(f"{flag} {file}" for flag, file in files if file)
    raise DataError(
        f"{found.path} was saved by a run with {was or 'other tokens'}, whose ids mean other "
        f"tokens than those of {' '.join(tokenizer.unique_identifiers['tokenizer_path'])} now: "
        "name the tokenizer of that run (train:N learns one from the data as it is now), or "
        "--finetune to begin anew from its parameters"
    )


WORKING_DIRECTORY = "working_directory"
"""Name of the argument with the directory in which a run was started."""
_PLACES = (
    *("vocab_file", "merge_file", "tokenizer_model", "sft_tokenizer_prompt_format"),
    *("load_hf", "pretrained_checkpoint", "load"),
)
"""Arguments that may name files of the run's, relative to its working directory."""
_NO_FILES = ("auto", "default", "plain")
"""Values of ``sft_tokenizer_prompt_format`` that name no file."""


def _placed(saved: Any) -> Any:
    """Arguments whose files are named from the root, as far as they are still where the run found
    them: another working directory may hold others of the same names."""
    folder = getattr(saved, WORKING_DIRECTORY, None)
    if not isinstance(folder, str):
        return saved
    for name in _PLACES:
        value = getattr(saved, name, None)
        if isinstance(value, str) and value and value not in _NO_FILES:
            place = os.path.join(folder, value)
            if os.path.exists(place):
                setattr(saved, name, place)
    return saved


_OF_CHOICE = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "data_parallel_size",
    "dpp_policy", "dpp_activation_cap", "dpp_split_backward", "length_costs", "packing", "order",
    "global_batch_size", "micro_batch_size",
)  # fmt: skip
"""Settings from which the choice of ``--dpp-slice-tokens auto`` follows, beside lengths."""


def other_slices(args: Settings, saved: Any, path: Path) -> str | None:
    """A warning that this run cuts its sequences otherwise than the run that saved, or may, as
    ``auto`` chooses by settings that are unlike; None where it does not."""
    there, here = (
        getattr(each, "dpp_slice_tokens", "off") if getattr(each, "use_dpp", False) else "off"
        for each in (saved, args)
    )
    if there != here:
        return (
            f"{path} was saved with --dpp-slice-tokens {there}, this run has {here}: it goes on "
            "with other slices, so its losses differ in the last bits from those of the run that "
            "saved it"
        )
    other = [name for name in _OF_CHOICE if getattr(saved, name, None) != getattr(args, name, None)]
    if here != "auto" or not other:
        return None
    was = ", ".join(f"{flag_name(name)} {getattr(saved, name, None)}" for name in other)
    return (
        f"{path} was saved with {was}: --dpp-slice-tokens auto may choose other slices in this "
        "run, and losses that differ in the last bits. A number keeps slices as they are"
    )


def check_optimizer(args: Settings, saved: Any, path: Path) -> None:
    """Refuse the state of another kind of optimizer: distributed or not, or with experts apart
    (ConfigError)."""
    if args.no_load_optim or args.finetune or args.skip_train:
        return
    there = getattr(saved, "use_distributed_optimizer", args.use_distributed_optimizer)
    if there != args.use_distributed_optimizer:
        forms = ("without", "with") if args.use_distributed_optimizer else ("with", "without")
        raise ConfigError(
            f"{path} was saved {forms[0]} --use-distributed-optimizer, this run goes {forms[1]} "
            "it: add --no-load-optim to go on with a new optimizer state"
        )
    size = getattr(saved, "expert_model_parallel_size", 1)
    if (size > 1) != (args.expert_model_parallel_size > 1):
        raise ConfigError(
            f"{path} was saved with --expert-model-parallel-size {size}, this run has "
            f"{args.expert_model_parallel_size}: above 1 the experts' optimizer state is kept "
            "apart; add --no-load-optim to go on with a new optimizer state"
        )
