"""Rules on sequences of unlike length: ``--sft``, ``--variable-length`` and their plans."""

from __future__ import annotations

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import require, require_value
from megatron.dpp.naming import flag_name
from megatron.dpp_train.options.run_config import Settings

_NEED = ("overlong", "packing", "packing_budget", "order", "length_costs")
_EXCLUDED = {
    "--mock-data": "it has one length; give --data-path",
    "--rampup-batch-size": "leave it out",
    "--full-validation": "give --eval-iters",
    "--decrease-batch-size-if-needed": "leave it out",
    "--reset-position-ids": "a sample is one document",
    "--reset-attention-mask": "a sample is one document",
    "--dataloader-fast-cache-load": "leave it out",
    "--dataloader-defer-npy-index-mmap": "leave it out",
    "--per-dataset-sequences-path": "leave it out",
    "--deepspeed-zero-stage": "leave it out",
}


def check_sequences(args: Settings) -> None:
    """Derives ``variable_lengths``, ``length_multiple``, ``length_buckets``, ``packing_budget`` and
    whether megatron-core's exchange sends shapes.

    Raises:
        ConfigError: a setting that does not go with sequences of unlike length.
    """
    require(not (args.sft and args.variable_length), "--sft and --variable-length exclude each "
            "other: chats have their own lengths")  # fmt: skip
    args.variable_lengths = args.sft or args.variable_length
    args.variable_seq_lengths = False
    args.length_buckets = ()
    if not args.variable_lengths:
        require(args.dpp_length_buckets == "off", "--dpp-length-buckets needs --sft or "
                "--variable-length: other samples have one length")  # fmt: skip
        for name in _NEED:
            given = dict(getattr(args, "given", {}))
            require(name not in given, f"{flag_name(name)} needs --sft or --variable-length")
        return
    for flag, instead in _EXCLUDED.items():
        given = getattr(args, flag[2:].replace("-", "_"))
        require(not given, f"--sft and --variable-length do not go with {flag}: {instead}")
    require(
        args.dataloader_type == "single",
        f"--dataloader-type {args.dataloader_type}: sequences of unlike length are shuffled in "
        "every epoch with --dataloader-type single",
    )
    args.create_attention_mask_in_dataloader = False  # causal attention needs none
    context = args.context_parallel_size
    spread = args.tensor_model_parallel_size if args.sequence_parallel else 1
    args.length_multiple = spread * (2 * context if context > 1 else 1)
    require(
        args.packing != "none" or args.seq_length % args.length_multiple == 0,
        f"--seq-length {args.seq_length}: must be a multiple of {args.length_multiple}, to which "
        "sequence and context parallelism pad rows",
    )
    _check_packing(args)
    _check_buckets(args)
    _check_exchange(args)


def _check_packing(args: Settings) -> None:
    if args.packing == "none":
        require(args.packing_budget is None, "--packing-budget needs --packing")
        args.packing_budget = 0
        return
    require(
        args.micro_batch_size == 1,
        f"--packing {args.packing} with --micro-batch-size {args.micro_batch_size}: a packed "
        "microbatch is one row; give --micro-batch-size 1",
    )
    require(
        args.context_parallel_size == 1 or args.transformer_impl == "local",
        f"--packing {args.packing} with --context-parallel-size {args.context_parallel_size} needs "
        f"--transformer-impl local, not {args.transformer_impl}",
    )
    require(
        args.context_parallel_size == 1 or not args.mtp_num_layers,
        f"--packing {args.packing} with --context-parallel-size {args.context_parallel_size} does "
        f"not go with --mtp-num-layers {args.mtp_num_layers}: the next tokens of a packed document "
        "lie on another rank",
    )
    if args.packing_budget is None:
        args.packing_budget = args.seq_length
    require_value(args, "packing_budget", args.packing_budget >= 1, "at least 1")


def _check_buckets(args: Settings) -> None:
    text = args.dpp_length_buckets
    if text == "off":
        return
    require(
        args.packing == "none",
        f"--dpp-length-buckets {text} with --packing {args.packing}: packed rows run without CUDA "
        "graphs, and need no buckets",
    )
    require(
        not args.num_experts,
        f"--dpp-length-buckets {text} with --num-experts {args.num_experts}: routers would send "
        "padding to experts",
    )
    config = DppConfig(length_buckets=text)
    args.length_buckets = config.buckets(args.seq_length, args.length_multiple)


def _check_exchange(args: Settings) -> None:
    """megatron-core's own exchange sends shapes ahead; ours carries them."""
    ranks = args.pipeline_model_parallel_size
    own = args.use_dpp or args.dpp_transport != "auto"
    args.variable_seq_lengths = ranks > 1 and not own
    if args.variable_seq_lengths and not args.num_experts:
        args.moe_token_dispatcher_type = "alltoall"  # megatron-core asks for it in any model
