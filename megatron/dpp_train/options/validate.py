"""Checks that flags fit together, and derives values: Megatron-LM's rules, as errors that name the
flag.

:func:`validate` runs on every rank, before any process group exists. It imports neither torch nor
megatron-core. ``model.configs.settled`` turns names of dtypes into dtypes and
switches kernels off that are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.dpp.errors import ConfigError, core_setting, require, require_multiple, require_value
from megatron.dpp.naming import flag_name, in_flags
from megatron.dpp.trace import parse_iterations
from megatron.dpp_train.options.arguments import build_parser
from megatron.dpp_train.options.layers import LOCAL, NEEDS_ENGINE
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.options.section import UNSET
from megatron.dpp_train.options.validate_experts import check_experts, check_prediction
from megatron.dpp_train.options.validate_forms import NOT_OF_BERT, check_forms
from megatron.dpp_train.options.validate_layout import check_cut, check_plan, virtual_stages
from megatron.dpp_train.options.validate_numbers import check_numbers, check_texts
from megatron.dpp_train.options.validate_packages import check_packages
from megatron.dpp_train.options.validate_ranges import (
    check_batches,
    check_heads,
    check_learning_rate,
    check_optimizer_kind,
    check_ranges,
    check_yarn,
)
from megatron.dpp_train.options.validate_sequences import check_sequences
from megatron.dpp_train.options.validate_slices import check_head, check_slices
from megatron.dpp_train.options.yaml_file import with_keys
from megatron.dpp_train.tokenizers import PIECE_TYPES

TOKENIZERS = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}


def validate(
    args: Settings, world_size: int, arch: str | None = None, *, elsewhere: bool = False
) -> RunConfig:
    """Check parsed ``args``, which stay as they are, and derive what Megatron derives.

    Args:
        arch: ``gpt`` or ``bert``, which differ in tokenizer and possible flags; None checks
            neither.
        elsewhere: the run is planned for another machine: no package need be installed here.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    draft = args.draft()
    draft.world_size = world_size
    with _naming_keys(args):
        if arch is not None:
            _family(draft, arch)
        for rule in RULES:
            rule(draft)
        check_packages(draft, elsewhere=elsewhere)
    return draft.frozen()


def check_sizes(args: Settings, world_size: int) -> None:
    """Apply the rules on sizes, layout and batch alone, which need no package.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    draft = args.draft()
    draft.world_size = world_size
    with _naming_keys(args):
        for rule in _SIZE_RULES:
            rule(draft)


@contextlib.contextmanager
def _naming_keys(args: Settings) -> Iterator[None]:
    """Let errors of the block name the keys of ``--yaml-cfg`` as its writer spelled them."""
    try:
        yield
    except ConfigError as error:
        if args.yaml_cfg is None:
            raise
        text = error.said(in_flags)
        found = with_keys(text, args.yaml_cfg, build_parser(), args.given)
        if found == text:
            raise
        raise ConfigError(found) from error


def _family(args: Settings, arch: str) -> None:
    args.tokenizer_type = args.tokenizer_type or TOKENIZERS[arch]
    if arch != "bert":
        return
    require(
        args.tokenizer_type not in ("HuggingFaceTokenizer", *PIECE_TYPES),
        f"--tokenizer-type {args.tokenizer_type}: BERT needs BertWordPieceLowerCase or "
        "BertWordPieceCase, and a vocab.txt",
    )
    others = dict.fromkeys(("sft", "variable_length", "num_experts", "mtp_num_layers"))
    for name, usual in (others | NOT_OF_BERT | {"dpp_slice_tokens": "off"}).items():
        value = getattr(args, name)
        require(
            not value or value == usual,
            f"{flag_name(name)}: only for GPT; BERT models have no such option",
        )
    require(
        args.context_parallel_size == 1,
        f"--context-parallel-size {args.context_parallel_size}: BERT's attention is not causal; "
        "only GPT's sequences are cut",
    )
    require(
        not args.full_validation,
        "--full-validation: BERT's data sets have no natural end; give --eval-iters",
    )
    require(
        args.dpp_head_in_forward != "on" or not args.bert_binary_head,
        "--dpp-head-in-forward on: BERT's binary head reads the hidden states beside the LM head: "
        "use --bert-no-binary-head, or leave it out",
    )


_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def _shape(args: Settings) -> None:
    args.num_layers = args.num_layers or args.encoder_num_layers or UNSET
    for name in _SIZES:
        require(getattr(args, name), f"{core_setting(name)} is required")
    args.seq_length = args.seq_length or args.encoder_seq_length
    require(args.seq_length, f"{core_setting('seq_length')} is required")
    args.encoder_seq_length = args.seq_length
    args.decoder_seq_length = None  # of no model here, yet static schedules would send that much
    for name in (*_SIZES, "ffn_hidden_size", "kv_channels", "seq_length"):
        value = getattr(args, name)
        require_value(args, name, value is None or value >= 1, "at least 1")
    if args.ffn_hidden_size is None:
        wide = int((4 * args.hidden_size * 2 / 3) / 64) * 64
        args.ffn_hidden_size = wide if args.swiglu else 4 * args.hidden_size
        require(
            args.ffn_hidden_size,
            f"--swiglu with {core_setting('hidden_size', args.hidden_size)}: two thirds of "
            "four times that, in multiples of 64, are 0; give --ffn-hidden-size",
        )
    if args.kv_channels is None:
        require_multiple(args, "hidden_size", "num_attention_heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    require(
        args.max_position_embeddings >= args.seq_length,
        f"{core_setting('max_position_embeddings', args.max_position_embeddings)} is below "
        f"{core_setting('seq_length', args.seq_length)}",
    )
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    require(
        args.add_position_embedding or args.position_embedding_type in ("rope", "yarn"),
        "--no-position-embedding: use --position-embedding-type none",
    )
    args.apply_rope_fusion &= args.position_embedding_type == "rope"
    args.bias_gelu_fusion &= args.add_bias_linear and not (
        args.squared_relu or args.quick_geglu or args.geglu
    )
    args.add_qkv_bias |= args.add_bias_linear
    require(
        args.swiglu + args.squared_relu + args.quick_geglu + args.geglu <= 1,
        "--swiglu, --squared-relu, --quick-geglu and --geglu exclude each other",
    )


def _layout(args: Settings) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    model = tensor * pipeline * context
    for name in ("tensor_model", "pipeline_model", "context"):
        name = f"{name}_parallel_size"
        require_value(args, name, getattr(args, name) >= 1, "at least 1")
    require(
        args.world_size % model == 0,
        f"{args.world_size} processes cannot hold "
        f"{core_setting('tensor_model_parallel_size', tensor)} x "
        f"{core_setting('pipeline_model_parallel_size', pipeline)} x "
        f"{core_setting('context_parallel_size', context)}: start a multiple of {model}",
    )
    args.data_parallel_size = args.world_size // model
    require(
        not args.hybrid_context_parallel,
        "--hybrid-context-parallel is not supported here: it gives each sequence ranks of its own, "
        "by a schedule of its own; leave it out",
    )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        require_multiple(args, name, "tensor_model_parallel_size")
    if context > 1:
        require(
            args.seq_length % (2 * context) == 0,
            f"{core_setting('seq_length', args.seq_length)} is not a multiple of twice "
            f"{core_setting('context_parallel_size', context)}",
        )
    if tensor == 1:
        args.sequence_parallel = False
    if args.sequence_parallel:
        require(
            args.seq_length % (tensor * context) == 0,
            f"{core_setting('seq_length', args.seq_length)} is not divisible by "
            f"{core_setting('tensor_model_parallel_size', tensor)} x "
            f"{core_setting('context_parallel_size', context)} (--sequence-parallel)",
        )
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tensor


def _batch(args: Settings) -> None:
    require(
        args.micro_batch_size is not None and args.micro_batch_size > 0,
        f"{core_setting('micro_batch_size')} is required",
    )
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = step
    require(
        args.global_batch_size % step == 0 or args.decrease_batch_size_if_needed,
        f"{core_setting('global_batch_size', args.global_batch_size)} is not a multiple of "
        f"{core_setting('micro_batch_size', args.micro_batch_size)} x {args.data_parallel_size} "
        "data-parallel replicas",
    )


def _length_of_training(args: Settings) -> None:
    require(
        (args.train_iters is None) != (args.train_samples is None),
        "give exactly one of --train-iters and --train-samples",
    )
    iterations, samples = ("lr_decay_iters", "rampup_batch_size"), ("lr_decay_samples",)
    wrong = samples + iterations[1:] if args.train_iters is not None else iterations[:1]
    mode = "--train-iters" if args.train_iters is not None else "--train-samples"
    for name in wrong:
        require(getattr(args, name) is None, f"{flag_name(name)} does not go with {mode}")
    warm = "lr_warmup_samples" if args.train_iters is not None else "lr_warmup_iters"
    require(not getattr(args, warm), f"{flag_name(warm)} does not go with {mode}")
    if args.lr_warmup_fraction is not None:
        require(
            not args.lr_warmup_iters and not args.lr_warmup_samples,
            "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples",
        )


def _precision(args: Settings) -> None:
    require(not (args.fp16 and args.bf16), "--fp16 and --bf16 exclude each other")
    if args.fp16 and not args.loss_scale:  # NaN is then a message to the loss scaler
        args.check_for_nan_in_loss_and_grad = False
    if args.bf16:
        if args.grad_reduce_in_bf16:
            args.accumulate_allreduce_grads_in_fp32 = False
        elif args.main_grads_dtype == "fp32":
            args.accumulate_allreduce_grads_in_fp32 = True
    half = args.fp16 or args.bf16
    require(not args.fp16_lm_cross_entropy or args.fp16, "--fp16-lm-cross-entropy needs --fp16")
    require(
        not args.fp32_residual_connection or half,
        "--fp32-residual-connection needs --fp16 or --bf16",
    )
    args.attention_softmax_in_fp32 |= args.apply_query_key_layer_scaling


def _optimizer(args: Settings) -> None:
    args.apply_wd_to_qk_layernorm |= args.no_weight_decay_cond_type is not None
    require(args.lr is not None or args.skip_train, "--lr is required")
    require(
        args.lr is None or args.min_lr <= args.lr,
        f"--min-lr {args.min_lr} is above --lr {args.lr}",
    )
    if args.weight_decay_incr_style == "constant":
        require(
            args.start_weight_decay is None and args.end_weight_decay is None,
            "--start/end-weight-decay need --weight-decay-incr-style linear or cosine",
        )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    else:
        require(
            args.start_weight_decay is not None and args.end_weight_decay is not None,
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs "
            "--start-weight-decay and --end-weight-decay",
        )
    if args.overlap_param_gather:
        require(
            args.use_distributed_optimizer and args.overlap_grad_reduce,
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
        )
    require(
        args.ddp_num_buckets is None or args.ddp_bucket_size is None,
        "--ddp-num-buckets and --ddp-bucket-size exclude each other",
    )


_NOT_WITH_FSDP2 = {
    "--pipeline-model-parallel-size above 1": "; nearest: --use-distributed-optimizer",
    "--expert-model-parallel-size above 1": "",
    "--use-distributed-optimizer": "",
    "--use-dpp": "",
    "--fp16": "; nearest: --bf16",
    "--ckpt-format torch": "",
    "--calculate-per-token-loss": "",
    "--log-params-norm": "",
}
"""Flags that PyTorch's FSDP2 excludes -> what to use in their place."""
_NOT_WITH_DEEPSPEED = dict.fromkeys(
    (
        "--tensor-model-parallel-size above 1", "--pipeline-model-parallel-size above 1",
        "--context-parallel-size above 1", "--expert-model-parallel-size above 1",
        "--use-distributed-optimizer", "--use-torch-fsdp2", "--use-dpp", "--overlap-grad-reduce",
        "--ckpt-format torch", "--async-save", "--skip-train", "--num-experts", "--mtp-num-layers",
        "--calculate-per-token-loss", "--log-params-norm", "--log-num-zeros-in-grad",
        "--check-weight-hash-across-dp-replicas-interval",
    ),
    "",
)  # fmt: skip
"""Flags that DeepSpeed's engine excludes."""


def _exclude(args: Settings, name: str, excluded: dict[str, str]) -> None:
    """Refuse what does not go with the flag ``name``: ``--flag``, ``--flag value`` or ``--flag
    above 1``."""
    for text, nearest in excluded.items():
        flag, _, value = text.partition(" ")
        now = getattr(args, flag[2:].replace("-", "_"))
        given = now > 1 if value == "above 1" else now == value if value else now
        require(not given, f"{name} does not go with {text}{nearest}")


def _fully_sharded(args: Settings) -> None:
    if args.use_torch_fsdp2:
        _exclude(args, "--use-torch-fsdp2", _NOT_WITH_FSDP2)
        args.gradient_accumulation_fusion = False


def _deepspeed(args: Settings) -> None:
    if not args.deepspeed_zero_stage:
        return
    name = f"--deepspeed-zero-stage {args.deepspeed_zero_stage}"
    _exclude(args, name, _NOT_WITH_DEEPSPEED)
    args.gradient_accumulation_fusion = False


def _memory(args: Settings) -> None:
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    require(
        args.recompute_granularity != "selective" or args.recompute_method is None,
        "--recompute-method needs --recompute-granularity full",
    )
    require(
        args.recompute_granularity != "full" or args.recompute_method is not None,
        "--recompute-granularity full needs --recompute-method uniform or block",
    )
    if args.recompute_granularity == "full" and args.recompute_num_layers is None:
        raise ConfigError("--recompute-granularity full needs --recompute-num-layers")
    again = args.recompute_modules if args.recompute_granularity == "selective" else None
    require(
        "mlp" not in (again or ()) or not args.add_bias_linear or bool(args.fp8),
        "--recompute-modules mlp does not go with biases: megatron-core's backward of it calls "
        "itself for ever; add --disable-bias-linear, or leave mlp out",
    )


def _kernels(args: Settings) -> None:
    if args.spec is not None:
        require(
            args.spec == ["local"],
            f"--spec {' '.join(args.spec)}: only local is possible here; a layer of your own goes "
            "into your own training loop (examples/gpt3/own_loop.py)",
        )
        args.transformer_impl = LOCAL
    if args.transformer_impl == LOCAL:
        args.no_persist_layer_norm = True
        require(
            args.context_parallel_size == 1 or not args.reset_attention_mask,
            f"--context-parallel-size {args.context_parallel_size} with --reset-attention-mask: "
            "the local layers cut causal attention alone; leave one of them out",
        )
        for name, flag in NEEDS_ENGINE.items():
            require(
                not getattr(args, name),
                f"{flag} needs modules of Transformer Engine, which the local layers have no "
                "substitute for; use --transformer-impl transformer_engine",
            )


def _data(args: Settings) -> None:
    separate = [args.train_data_path, args.valid_data_path, args.test_data_path]
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--data-args-path": args.data_args_path,
        "--train/valid/test-data-path": any(separate),
        "--per-split-data-args-path": args.per_split_data_args_path,
    }
    given = [name for name, value in sources.items() if value]
    require(given, "no data: give --data-path, --train-data-path or --mock-data")
    require(len(given) == 1, f"{' and '.join(given)} exclude each other")
    if (args.data_path or args.data_args_path) and args.split is None:
        args.split = "969, 30, 1"
    args.dataloader_type = args.dataloader_type or "single"


def _checkpoints(args: Settings) -> None:
    if args.save:
        require(
            args.save_interval is not None and args.save_interval > 0,
            "--save needs --save-interval of at least 1",
        )
    if args.save_retain_interval is not None:
        require(
            args.save_interval and args.save_retain_interval % args.save_interval == 0,
            f"--save-retain-interval {args.save_retain_interval} is not a multiple of "
            f"--save-interval {args.save_interval}",
        )
    require(
        not args.async_save or args.ckpt_format == "torch_dist",
        "--async-save needs --ckpt-format torch_dist",
    )


def _evaluation(args: Settings) -> None:
    require(
        args.eval_interval or not args.eval_iters or args.skip_train,
        "--eval-interval is required (or --eval-iters 0)",
    )
    require_value(args, "log_interval", args.log_interval > 0, "at least 1")


def _writers(args: Settings) -> None:
    for flag, value, needed, there in (
        ("--mlflow-run-name", args.mlflow_run_name, "--mlflow-experiment", args.mlflow_experiment),
        ("--mlflow-tracking-uri", args.mlflow_tracking_uri, "--mlflow-experiment",
         args.mlflow_experiment),
        ("--trackio-run-name", args.trackio_run_name, "--trackio-project", args.trackio_project),
    ):  # fmt: skip
        require(there or not value, f"{flag} {value} needs {needed}")


def _trace(args: Settings) -> None:
    require_value(args, "trace_interval", args.trace_interval >= 1, "at least 1")
    try:
        parse_iterations(args.trace_iterations or "0")
    except ValueError as error:
        raise ConfigError(f"--trace-iterations: {error}") from error


_SIZE_RULES = (
    check_texts,
    check_numbers,
    _shape,
    check_heads,
    check_yarn,
    _layout,
    check_plan,
    virtual_stages,
    _batch,
    check_batches,
)
RULES = (
    *_SIZE_RULES,
    _length_of_training,
    _precision,
    _optimizer,
    check_learning_rate,  # needs the weight decay that _optimizer derives
    check_optimizer_kind,
    _fully_sharded,
    _deepspeed,
    _memory,
    check_cut,  # needs the recompute granularity of _memory
    _kernels,
    check_experts,  # needs the layers' implementation of _kernels
    check_prediction,
    check_head,
    _data,
    check_sequences,  # needs the kind of loader of _data
    check_slices,  # needs the multiple of lengths of check_sequences
    _checkpoints,
    _evaluation,
    check_ranges,
    check_forms,
    _writers,
    _trace,
)
"""In this order: each rule may read what those before it have derived. A rule derives first and
checks then, and writes to the draft of :func:`validate` alone."""
