"""Rules of ``validate`` on forms of layers: those that only the local layers have, and windows."""

from __future__ import annotations

from megatron.dpp.errors import require
from megatron.dpp.naming import flag_name
from megatron.dpp_train.options.run_config import Settings

NOT_OF_BERT = {
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0),
    **dict.fromkeys(("output_norms", "qk_norm_over_heads"), False),
    **dict.fromkeys(("family", "window_size", "window_rotary_base"), None),
}
"""Setting -> its value in a BERT model."""


def forms_asked(args: Settings) -> dict[str, bool]:
    """Flag of a form that only the local layers have -> whether it is given."""
    return {
        "--geglu": args.geglu,
        "--output-norms": args.output_norms,
        "--no-input-norms": not args.input_norms,
        "--qk-norm-over-heads": args.qk_norm_over_heads,
        **{
            flag_name(name): getattr(args, name) != 1.0
            for name in ("embedding_scale", "residual_scale", "logit_scale")
        },
        "--window-rotary-base": args.window_rotary_base is not None,
    }


def check_forms(args: Settings) -> None:
    """Refuse forms of layers that the run's layers do not have (ConfigError)."""
    for flag, given in forms_asked(args).items():
        require(
            not given or args.transformer_impl == "local",
            f"{flag} needs --transformer-impl local, not {args.transformer_impl}",
        )
    require(
        not args.qk_norm_over_heads or (args.qk_layernorm and args.normalization == "RMSNorm"),
        "--qk-norm-over-heads needs --qk-layernorm and --normalization RMSNorm",
    )
    require(
        args.window_rotary_base is None or args.window_size is not None,
        "--window-rotary-base needs --window-size",
    )
    windows = {
        "--window-size": args.window_size is not None,
        f"--softmax-type {args.softmax_type}": args.softmax_type != "vanilla",
    }
    for flag, given in windows.items():
        require(
            not given or args.transformer_impl != "local" or args.context_parallel_size == 1,
            f"{flag} with --context-parallel-size {args.context_parallel_size}: the local layers "
            "cut plain causal attention alone; use --context-parallel-size 1",
        )
    if args.window_size is not None:
        left = args.window_size[0]
        require(
            len(args.window_size) == 2 and left >= 0 and args.window_size[1] == 0,
            f"--window-size {','.join(map(str, args.window_size))}: expected tokens to the left, "
            "from 0 on, and 0 to the right, like 127,0",
        )
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        pattern = getattr(args, name)
        require(
            not isinstance(pattern, list) or len(pattern) == args.num_layers,
            f"{flag_name(name)} {pattern}: expected one number for each of --num-layers "
            f"{args.num_layers}",
        )
