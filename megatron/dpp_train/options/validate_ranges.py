"""Rules of ``validate`` about single numbers, batches and learning rates, which megatron-core and
PyTorch would meet with a bare assertion or a shape error.

Each raises ConfigError for the first setting that cannot work.
"""

from __future__ import annotations

from megatron.dpp.errors import core_setting, require, require_multiple, require_value
from megatron.dpp_train.options.run_config import Settings


def check_ranges(args: Settings) -> None:
    """Numbers out of range."""
    for name in ("hidden_dropout", "attention_dropout"):
        require_value(args, name, 0 <= getattr(args, name) <= 1, "between 0 and 1")
    for name in ("adam_beta1", "adam_beta2"):
        require_value(args, name, 0 <= getattr(args, name) < 1, "at least 0 and below 1")
    require_value(args, "mask_prob", 0 < args.mask_prob < 1, "above 0 and below 1")
    require_value(args, "masking_max_ngram", args.masking_max_ngram > 0, "above 0")
    require(
        not (args.masking_use_geometric_distribution and args.masking_do_permutation),
        "--masking-use-geometric-distribution and --masking-do-permutation exclude each other",
    )
    require_value(args, "seed", 0 <= args.seed < 2**31, "between 0 and 2^31 - 1")
    require_value(args, "eval_iters", args.eval_iters >= 0, "at least 0")
    if args.fp16 and not args.loss_scale:
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            require_value(args, name, getattr(args, name) > 0, "above 0")
        require(
            args.initial_loss_scale >= args.min_loss_scale,
            f"--initial-loss-scale {args.initial_loss_scale} is below --min-loss-scale "
            f"{args.min_loss_scale}",
        )


def check_heads(args: Settings) -> None:
    """Heads that do not divide into query groups, channels that do not into rotated pairs."""
    if args.group_query_attention:
        require_value(args, "num_query_groups", args.num_query_groups >= 1, "at least 1")
        require_multiple(args, "num_attention_heads", "num_query_groups")
    rotated = int(args.kv_channels * args.rotary_percent)
    require(
        args.position_embedding_type not in ("rope", "yarn") or rotated % 2 == 0,
        f"--position-embedding-type {args.position_embedding_type} turns channels in pairs: "
        f"{rotated} of --kv-channels {args.kv_channels} (--rotary-percent {args.rotary_percent}) "
        "is odd",
    )


def check_yarn(args: Settings) -> None:
    """Values that YaRN cannot have, or that megatron-core would ignore with it."""
    if args.position_embedding_type != "yarn":
        return
    yarn, original = "--position-embedding-type yarn", args.yarn_original_max_position_embeddings
    require(original, f"{yarn} needs --yarn-original-max-position-embeddings")
    require_value(args, "yarn_original_max_position_embeddings", (original or 0) >= 1, "at least 1")
    require_value(args, "rotary_scaling_factor", args.rotary_scaling_factor >= 1, "at least 1")
    require_value(args, "yarn_beta_slow", args.yarn_beta_slow > 0, "above 0")
    require_value(
        args,
        "yarn_beta_fast",
        args.yarn_beta_fast > args.yarn_beta_slow,
        f"above --yarn-beta-slow {args.yarn_beta_slow}",
    )
    for flag, off in (
        ("--rotary-percent", args.rotary_percent == 1),
        ("--rotary-interleaved", not args.rotary_interleaved),
        ("--use-rope-scaling", not args.use_rope_scaling),
        ("--multi-latent-attention", not args.multi_latent_attention),
    ):
        value = getattr(args, flag[2:].replace("-", "_"))
        given = flag if value is True else f"{flag} {value}"
        require(off, f"{yarn} does not go with {given}")


def check_learning_rate(args: Settings) -> None:
    """Learning rate and weight decay, as megatron-core's scheduler asserts."""
    unit = "iters" if args.train_iters is not None else "samples"
    total = getattr(args, f"train_{unit}")
    own_decay = getattr(args, f"lr_decay_{unit}")
    decay = own_decay or total
    decay_flag = f"--{'lr-decay' if own_decay else 'train'}-{unit} {decay}"
    fraction, steps = args.lr_warmup_fraction, getattr(args, f"lr_warmup_{unit}")
    require_value(args, f"train_{unit}", total > 0, "at least 1")
    require(decay > 0, f"{decay_flag}: must be at least 1")
    in_range = fraction is None or 0 <= fraction < 1
    require_value(args, "lr_warmup_fraction", in_range, "at least 0 and below 1")
    require(
        fraction is not None or steps < decay,
        f"--lr-warmup-{unit} {steps} is not below {decay_flag}: warming up must end before the "
        "decay does",
    )
    require(
        args.lr_decay_style != "WSD" or getattr(args, f"lr_wsd_decay_{unit}") is not None,
        f"--lr-decay-style WSD with --train-{unit} needs --lr-wsd-decay-{unit}",
    )
    wsd = getattr(args, f"lr_wsd_decay_{unit}")
    require(
        args.lr_decay_style != "WSD" or wsd <= decay,
        f"--lr-wsd-decay-{unit} {wsd} is above {decay_flag}, whose last part it is",
    )
    require(args.min_lr >= 0, f"--min-lr {args.min_lr} is below 0")
    require(
        args.lr is None or args.lr_warmup_init <= args.lr,
        f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}",
    )
    require(
        not (args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler),
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
        "other",
    )
    require(
        0 <= args.start_weight_decay <= args.end_weight_decay,
        f"weight decay goes from {args.start_weight_decay} to {args.end_weight_decay}: it must "
        "not be below 0, nor fall (--weight-decay, --start-weight-decay, --end-weight-decay)",
    )


def check_batches(args: Settings) -> None:
    """The ramp of the batch size, and the groups of microbatches of the interleaved schedule."""
    step = args.micro_batch_size * args.data_parallel_size
    if args.rampup_batch_size is not None:
        first, increment, samples = (int(word) for word in args.rampup_batch_size)
        way = args.global_batch_size - first
        require(
            first > 0 and increment > 0 and samples > 0 and way >= 0 and way % increment == 0,
            f"--rampup-batch-size {first} {increment} {samples}: expected START INCREMENT SAMPLES "
            f"above 0, and a whole number of increments from START to --global-batch-size "
            f"{args.global_batch_size}",
        )
        require(
            (first % step == 0 and (way == 0 or increment % step == 0))
            or args.decrease_batch_size_if_needed,
            f"--rampup-batch-size {first} {increment} {samples}: batches on the way are no "
            f"multiple of --micro-batch-size {args.micro_batch_size} x {args.data_parallel_size} "
            "data-parallel replicas (--decrease-batch-size-if-needed rounds them down)",
        )
    if not args.virtual_pipeline_model_parallel_size or args.use_dpp:
        return
    pipeline = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or pipeline
    microbatches = args.global_batch_size // step
    rest = microbatches % group if group else 0
    require(
        pipeline <= group <= microbatches and (rest == 0 or rest >= pipeline),
        f"{microbatches} microbatches ({core_setting('global_batch_size')} / "
        f"{core_setting('micro_batch_size')} / replicas) in groups of {group}: the interleaved "
        f"schedule needs groups of {core_setting('pipeline_model_parallel_size', pipeline)} "
        "(--microbatch-group-size-per-virtual-pipeline-stage) or more, at least one, and no "
        "smaller rest; --use-dpp takes any number",
    )


def check_optimizer_kind(args: Settings) -> None:
    """The distributed optimizer, and Adam on the CPU."""
    require(
        args.optimizer == "adam" or not args.use_distributed_optimizer,
        f"--optimizer {args.optimizer} does not go with --use-distributed-optimizer: it shards "
        "Adam's state",
    )
    require(
        not args.overlap_param_gather_with_optimizer_step
        or (args.overlap_param_gather and args.virtual_pipeline_model_parallel_size),
        "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather and virtual "
        "pipeline stages",
    )
    instances = args.num_distributed_optimizer_instances
    require(
        instances > 0 and args.data_parallel_size % instances == 0,
        f"--num-distributed-optimizer-instances {instances} does not divide "
        f"{args.data_parallel_size} data-parallel replicas",
    )
    require(
        not args.optimizer_cpu_offload or args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload needs --use-precision-aware-optimizer",
    )
