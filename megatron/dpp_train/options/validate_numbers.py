"""Rules of ``validate`` on single numbers and lists of them: none is senseless. They come first, as
other rules compute with the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron.dpp.errors import require, require_value
from megatron.dpp_train.options.run_config import Settings

_FROM_0 = "at least 0", lambda value: value >= 0
_FROM_1 = "at least 1", lambda value: value >= 1
_ABOVE_0 = "above 0", lambda value: value > 0
_BOUNDS: dict[tuple[str, Callable[[Any], bool]], tuple[str, ...]] = {
    _FROM_0: (
        *("adam_eps", "clip_grad", "init_method_std", "layernorm_epsilon", "eval_interval"),
        *("iterations_to_skip", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init"),
        *("lr_wsd_decay_iters", "lr_wsd_decay_samples", "num_workers", "manual_gc_interval"),
        *("profile_ranks", "profile_step_start", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("embedding_init_method_std", "vocab_extra_ids", "ckpt_step", "mtp_loss_scaling_factor"),
        *("mid_level_dataset_surplus", "moe_input_jitter_eps"),
    ),
    _FROM_1: (
        *("save_interval", "exit_interval", "tensorboard_log_interval", "recompute_num_layers"),
        *("check_weight_hash_across_dp_replicas_interval", "distributed_timeout_minutes"),
        *("window_attn_skip_freq", "moe_layer_freq", "rotary_seq_len_interpolation_factor"),
        *("num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads", "seq_length"),
        *("encoder_seq_length", "max_position_embeddings", "micro_batch_size", "vocab_size"),
        *("global_batch_size", "make_vocab_size_divisible_by", "num_query_groups"),
        *("moe_router_topk", "moe_ffn_hidden_size", "num_dataset_builder_threads"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "tensorboard_queue_size"),
    ),
    _ABOVE_0: (
        *("exit_duration_in_mins", "loss_scale", "rotary_base", "decoupled_lr", "softmax_scale"),
        *("embedding_scale", "residual_scale", "logit_scale", "rope_scaling_factor"),
        "activation_func_clamp_value",
    ),
    ("above 0 and at most 1", lambda value: 0 < value <= 1): ("rotary_percent",),
    ("at least 0 and below 1", lambda value: 0 <= value < 1): ("sgd_momentum",),
    ("0, 1 or 2", lambda value: value in (0, 1, 2)): ("empty_unused_memory_level",),
}
"""Rule and test, and the settings that it holds for; None is no value. A list of one number per
layer (``[1,0]``) is held by other rules."""


_MOST = dict.fromkeys(("seq_length", "encoder_seq_length"), 1 << 24)
_MOST_OF_ALL = (1 << 63) - 1
"""Whole numbers above these are taken for slips: what counts with them would not end."""


def check_texts(args: Settings) -> None:
    """Flags that are given an empty text, as of a variable of a shell that is not set: a run would
    begin anew or write no checkpoint. Empty names of Weights & Biases mean that it is off."""
    for name, flag in args.given.items():
        empty = getattr(args, name, None) == "" and not name.startswith("wandb_")
        require(not empty, f"{flag} is empty: give a value, or leave it out")


def check_numbers(args: Settings) -> None:
    """Numbers that no run can mean: not finite, or out of the range of their setting."""
    for name in (*_MOST, *vars(args)):
        most = _MOST.get(name, _MOST_OF_ALL)
        wholes = [each for each in _numbers(getattr(args, name)) if isinstance(each, int)]
        require_value(args, name, all(each <= most for each in wholes), f"at most {most}")
    for name in vars(args):
        numbers = [each for each in _numbers(getattr(args, name)) if isinstance(each, float)]
        require_value(args, name, all(map(math.isfinite, numbers)), "finite")
    for (rule, good), names in _BOUNDS.items():
        for name in names:
            value = getattr(args, name, None)
            if name.endswith("_freq") and isinstance(value, list):
                continue
            require_value(args, name, all(map(good, _numbers(value))), rule)
    require(
        not args.profile or args.profile_step_start < args.profile_step_end,
        f"--profile-step-start {args.profile_step_start} is not below --profile-step-end "
        f"{args.profile_step_end}",
    )
    require(
        args.decoupled_min_lr is None or args.decoupled_lr is not None,
        f"--decoupled-min-lr {args.decoupled_min_lr} needs --decoupled-lr",
    )


def _numbers(value: Any) -> Iterator[float]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            yield each
