"""The flags of Megatron-LM that are no field of a megatron-core dataclass, or are spelt unlike it.

A table, which is why this file is long: name, type, default, help; names, defaults and
destinations are those of Megatron-LM core_v0.16.1. ``arguments`` turns the rows into a parser and
adds the generated flags.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Flag(NamedTuple):
    """One flag. ``kind`` is a type, or ``True``/``False`` for a switch that stores it."""

    name: str
    kind: Any
    default: Any
    help: str
    dest: str | None = None
    choices: tuple[str | int, ...] | None = None
    nargs: str | int | None = None


MODEL = (
    Flag("--max-position-embeddings", int, None, "longest sequence the position embedding knows"),
    Flag(
        "--position-embedding-type",
        str,
        "learned_absolute",
        "position embedding",
        choices=("learned_absolute", "rope", "none"),
    ),
    Flag(
        "--use-rotary-position-embeddings",
        True,
        False,
        "old name of --position-embedding-type rope",
    ),
    Flag("--rotary-base", int, 10000, "base of the rotary embedding"),
    Flag("--rotary-percent", float, 1.0, "share of a head that is rotated"),
    Flag(
        "--rotary-seq-len-interpolation-factor",
        int,
        None,
        "stretch rotary positions by this factor",
    ),
    Flag("--use-rope-scaling", True, False, "scale rotary frequencies as Llama 3 does"),
    Flag("--rope-scaling-factor", float, 8.0, "factor of --use-rope-scaling"),
    Flag(
        "--make-vocab-size-divisible-by",
        int,
        128,
        "pad the vocabulary to a multiple of this per rank",
    ),
    Flag("--group-query-attention", True, False, "share keys and values between groups of heads"),
    Flag("--swiglu", True, False, "gated SiLU instead of GELU"),
    Flag("--squared-relu", True, False, "squared ReLU instead of GELU"),
    Flag("--quick-geglu", True, False, "gated quick GELU instead of GELU"),
    Flag(
        "--bert-no-binary-head",
        False,
        True,
        "BERT without its binary head",
        dest="bert_binary_head",
    ),
    Flag("--untie-embeddings-and-output-weights", True, False, "separate output weights"),
    Flag("--num-experts", int, None, "experts per mixture-of-experts layer"),
    Flag("--init-method-xavier-uniform", True, False, "Xavier uniform initialisation"),
    Flag(
        "--no-masked-softmax-fusion",
        False,
        True,
        "unfused attention softmax",
        dest="masked_softmax_fusion",
    ),
    Flag("--no-bias-gelu-fusion", False, True, "unfused bias and GELU", dest="bias_gelu_fusion"),
    Flag(
        "--no-bias-swiglu-fusion", False, True, "unfused bias and SwiGLU", dest="bias_swiglu_fusion"
    ),
    Flag(
        "--no-bias-dropout-fusion",
        False,
        True,
        "unfused bias and dropout",
        dest="bias_dropout_fusion",
    ),
    Flag("--no-rope-fusion", False, True, "unfused rotary embedding", dest="apply_rope_fusion"),
    Flag("--attention-softmax-in-fp32", True, False, "attention softmax in fp32"),
    Flag("--no-persist-layer-norm", True, False, "no persistent layer norm kernel"),
    Flag(
        "--no-gradient-accumulation-fusion",
        False,
        True,
        "no fused gradient accumulation",
        dest="gradient_accumulation_fusion",
    ),
    Flag("--recompute-activations", True, False, "same as --recompute-granularity selective"),
    Flag("--fp16-lm-cross-entropy", True, False, "cross entropy in fp16"),
    Flag("--use-flash-attn", True, False, "flash attention where the implementation has it"),
    Flag(
        "--use-mcore-models",
        True,
        False,
        "accepted for old scripts: these are the only models",
        dest="deprecated_use_mcore_models",
    ),
    Flag("--disable-jit-fuser", True, False, "do not compile small functions"),
)

TRAINING = (
    Flag("--micro-batch-size", int, None, "samples of one microbatch on one data-parallel rank"),
    Flag("--global-batch-size", int, None, "samples per iteration over all ranks"),
    Flag("--rampup-batch-size", int, None, "start size, increment, samples of the ramp", nargs=3),
    Flag(
        "--decrease-batch-size-if-needed",
        True,
        False,
        "round the batch size down when it does not divide",
    ),
    Flag("--train-iters", int, None, "iterations of all runs together"),
    Flag("--train-samples", int, None, "samples of all runs together, instead of --train-iters"),
    Flag("--exit-interval", int, None, "save and leave after an iteration that this divides"),
    Flag("--exit-duration-in-mins", int, None, "save and leave after this many minutes"),
    Flag("--exit-signal-handler", True, False, "save and leave on SIGTERM"),
    Flag("--empty-unused-memory-level", int, 0, "return cached device memory: 0 never, 1, 2"),
    Flag(
        "--check-weight-hash-across-dp-replicas-interval",
        int,
        None,
        "compare the parameters of data-parallel replicas this often",
    ),
    Flag("--train-sync-interval", int, None, "wait for the device this often"),
    Flag("--iterations-to-skip", int, None, "iterations whose data is skipped", nargs="+"),
    Flag("--manual-gc", True, False, "collect garbage only where asked"),
    Flag("--manual-gc-interval", int, 0, "iterations between manual collections"),
    Flag(
        "--no-manual-gc-eval",
        False,
        True,
        "no manual collection around evaluation",
        dest="manual_gc_eval",
    ),
    Flag(
        "--no-check-for-nan-in-loss-and-grad",
        False,
        True,
        "do not stop on NaN",
        dest="check_for_nan_in_loss_and_grad",
    ),
    Flag("--check-for-large-grads", True, False, "stop on unexpectedly large gradients"),
    Flag("--check-for-spiky-loss", True, False, "report a loss ten times above its recent values"),
    Flag("--seed", int, 1234, "seed of everything random"),
    Flag(
        "--data-parallel-random-init",
        True,
        False,
        "initialise replicas differently, then broadcast",
    ),
    Flag("--te-rng-tracker", True, False, "Transformer Engine's random state tracker"),
    Flag("--calc-ft-timeouts", True, False, "accepted; has no effect here"),
    Flag("--yaml-cfg", str, None, "file of settings; the command line wins over it"),
)

OPTIMIZER = (
    Flag("--optimizer", str, "adam", "optimizer", choices=("adam", "sgd")),
    Flag("--lr", float, None, "highest learning rate"),
    Flag("--min-lr", float, 0.0, "lowest learning rate"),
    Flag(
        "--lr-decay-style",
        str,
        "linear",
        "how the learning rate falls",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Flag(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "annealing of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    Flag("--lr-decay-iters", int, None, "iterations over which it falls"),
    Flag("--lr-decay-samples", int, None, "samples over which it falls"),
    Flag("--lr-wsd-decay-iters", int, None, "iterations of WSD's annealing"),
    Flag("--lr-wsd-decay-samples", int, None, "samples of WSD's annealing"),
    Flag("--lr-warmup-fraction", float, None, "share of the decay spent warming up"),
    Flag("--lr-warmup-iters", int, 0, "iterations of linear warm-up"),
    Flag("--lr-warmup-samples", int, 0, "samples of linear warm-up"),
    Flag("--lr-warmup-init", float, 0.0, "learning rate where warm-up starts"),
    Flag(
        "--override-opt_param-scheduler",
        True,
        False,
        "schedule from flags, not from the checkpoint",
        dest="override_opt_param_scheduler",
    ),
    Flag(
        "--use-checkpoint-opt_param-scheduler",
        True,
        False,
        "schedule from the checkpoint, not from flags",
        dest="use_checkpoint_opt_param_scheduler",
    ),
    Flag("--start-weight-decay", float, None, "weight decay at the start"),
    Flag("--end-weight-decay", float, None, "weight decay at the end"),
    Flag(
        "--weight-decay-incr-style",
        str,
        "constant",
        "how it grows",
        choices=("constant", "linear", "cosine"),
    ),
    Flag(
        "--optimizer-offload-fraction", float, 1.0, "share of the optimizer state kept on the host"
    ),
    Flag("--no-pin-cpu-grads", False, True, "unpinned host gradients", dest="pin_cpu_grads"),
    Flag("--no-pin-cpu-params", False, True, "unpinned host parameters", dest="pin_cpu_params"),
    Flag("--main-grads-dtype", str, "fp32", "dtype of main gradients", choices=("fp32", "bf16")),
    Flag("--main-params-dtype", str, "fp32", "dtype of main parameters", choices=("fp32", "fp16")),
    Flag(
        "--exp-avg-dtype",
        str,
        "fp32",
        "dtype of Adam's mean",
        choices=("fp32", "fp16", "bf16", "fp8"),
    ),
    Flag(
        "--exp-avg-sq-dtype",
        str,
        "fp32",
        "dtype of Adam's variance",
        choices=("fp32", "fp16", "bf16", "fp8"),
    ),
    Flag("--grad-reduce-in-bf16", True, False, "reduce gradients in bf16"),
    Flag(
        "--accumulate-allreduce-grads-in-fp32",
        True,
        False,
        "accumulate and reduce gradients in fp32",
    ),
)

DISTRIBUTED = (
    Flag(
        "--distributed-backend", str, "nccl", "torch.distributed backend", choices=("nccl", "gloo")
    ),
    Flag("--distributed-timeout-minutes", int, 10, "timeout of collectives"),
    Flag("--num-layers-per-virtual-pipeline-stage", int, None, "layers of one chunk"),
    Flag("--num-virtual-stages-per-pipeline-rank", int, None, "chunks per pipeline rank"),
    Flag(
        "--pipeline-model-parallel-layout",
        str,
        None,
        'layers of each stage as text, for example "Et*3|tt|tt|tL"',
    ),
    Flag("--decoder-first-pipeline-num-layers", int, None, "layers on the first pipeline rank"),
    Flag("--decoder-last-pipeline-num-layers", int, None, "layers on the last pipeline rank"),
    Flag(
        "--no-overlap-p2p-communication",
        False,
        True,
        "static interleaved schedule without overlap",
        dest="overlap_p2p_comm",
    ),
    Flag("--overlap-grad-reduce", True, False, "reduce gradients while the backward runs"),
    Flag(
        "--no-align-grad-reduce",
        False,
        True,
        "stages reduce gradients independently",
        dest="align_grad_reduce",
    ),
    Flag("--ddp-num-buckets", int, None, "buckets of the gradient reduction"),
    Flag("--use-torch-fsdp2", True, False, "shard parameters, gradients and optimizer (FSDP2)"),
    Flag(
        "--torch-fsdp2-no-reshard-after-forward",
        False,
        True,
        "keep gathered parameters until the backward has used them",
        dest="torch_fsdp2_reshard_after_forward",
    ),
    Flag(
        "--deepspeed-zero-stage",
        int,
        None,
        "train with DeepSpeed's engine: share out the optimizer (1), gradients (2), parameters (3)",
        choices=(1, 2, 3),
    ),
    Flag("--ddp-bucket-size", int, None, "parameters per bucket"),
    Flag("--ddp-pad-buckets-for-high-nccl-busbw", True, False, "pad buckets to a multiple of 2^16"),
    Flag(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        True,
        False,
        "sum in fp32 what travels in bf16",
    ),
    Flag("--ddp-average-in-collective", True, False, "average inside the collective"),
    Flag(
        "--no-align-param-gather",
        False,
        True,
        "stages gather parameters independently",
        dest="align_param_gather",
    ),
    Flag(
        "--no-scatter-gather-tensors-in-pipeline",
        False,
        True,
        "accepted for old scripts",
        dest="scatter_gather_tensors_in_pipeline",
    ),
    Flag(
        "--no-gradient-reduce-div-fusion",
        False,
        True,
        "divide gradients apart from the reduction",
        dest="gradient_reduce_div_fusion",
    ),
    Flag("--cp-comm-type", str, ("p2p",), "how context-parallel ranks exchange", nargs="+"),
    Flag("--use-tp-pp-dp-mapping", True, False, "rank order tp-cp-ep-pp-dp"),
    Flag(
        "--disable-gloo-process-groups",
        False,
        True,
        "no extra gloo groups",
        dest="enable_gloo_process_groups",
    ),
    Flag("--nccl-communicator-config-path", str, None, "YAML file of NCCL communicator settings"),
    Flag("--local-rank", int, None, "rank on this host; torchrun's LOCAL_RANK wins"),
)

DATA = (
    Flag(
        "--data-path", str, None, "prefixes, or weights and prefixes, split by --split", nargs="*"
    ),
    Flag("--train-data-path", str, None, "prefixes of the training set alone", nargs="*"),
    Flag("--valid-data-path", str, None, "prefixes of the validation set alone", nargs="*"),
    Flag("--test-data-path", str, None, "prefixes of the test set alone", nargs="*"),
    Flag("--data-args-path", str, None, "file that holds what --data-path would"),
    Flag("--per-split-data-args-path", str, None, "JSON file with train, valid and test lists"),
    Flag("--split", str, None, "shares of training, validation and test, like 949,50,1"),
    Flag("--mock-data", True, False, "artificial data"),
    Flag("--seq-length", int, None, "tokens per sample"),
    Flag("--encoder-seq-length", int, None, "older name of --seq-length"),
    Flag("--decoder-seq-length", int, None, "decoder sequence length; no model here has one"),
    Flag("--data-cache-path", str, None, "directory of cached sample indices"),
    Flag(
        "--no-mmap-bin-files",
        False,
        True,
        "read .bin files without mapping them",
        dest="mmap_bin_files",
    ),
    Flag("--num-workers", int, 2, "processes of a data loader"),
    Flag(
        "--dataloader-type",
        str,
        None,
        "single or cyclic pass over the data",
        choices=("single", "cyclic"),
    ),
    Flag(
        "--no-data-sharding", False, True, "cyclic: shuffle over all replicas", dest="data_sharding"
    ),
    Flag("--reset-position-ids", True, False, "positions restart after a document"),
    Flag("--reset-attention-mask", True, False, "attention stops at a document"),
    Flag("--eod-mask-loss", True, False, "no loss at the end of a document"),
    Flag(
        "--no-create-attention-mask-in-dataloader",
        False,
        True,
        "leave the mask to the attention",
        dest="create_attention_mask_in_dataloader",
    ),
    Flag("--dataloader-fast-cache-load", True, False, "skip checks when all indices are cached"),
    Flag("--dataloader-defer-npy-index-mmap", True, False, "map cached indices at first use"),
    Flag("--per-dataset-sequences-path", str, None, "JSON file: sequences per data set"),
    Flag("--num-dataset-builder-threads", int, 1, "threads that build data sets"),
    Flag("--mask-prob", float, 0.15, "BERT: share of masked tokens"),
    Flag("--short-seq-prob", float, 0.1, "BERT: share of short samples"),
    Flag(
        "--tokenizer-type",
        str,
        None,
        "tokenizer",
        choices=(
            "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "NullTokenizer",
        ),
    ),
    Flag("--vocab-file", str, None, "vocabulary"),
    Flag("--merge-file", str, None, "BPE merges"),
    Flag("--vocab-size", int, None, "words of a NullTokenizer"),
    Flag(
        "--padded-vocab-size", int, None, "vocabulary size of the model, instead of the padded one"
    ),
    Flag("--vocab-extra-ids", int, 0, "further tokens of a BERT vocabulary"),
    Flag("--legacy-tokenizer", True, False, "accepted: tokenizers read local files in either case"),
    Flag("--eval-iters", int, 100, "iterations of one evaluation"),
    Flag("--eval-interval", int, None, "iterations between evaluations"),
    Flag("--skip-train", True, False, "evaluate only"),
    Flag("--full-validation", True, False, "validate on the whole validation set"),
)

LOGGING = (
    Flag("--log-interval", int, 100, "iterations between log lines"),
    Flag("--log-throughput", True, False, "TFLOP/s per GPU in the log line"),
    Flag("--log-params-norm", True, False, "norm of the parameters in the log line"),
    Flag("--log-num-zeros-in-grad", True, False, "zeros of the gradient in the log line"),
    Flag("--log-progress", True, False, "append to progress.txt beside the checkpoints"),
    Flag("--timing-log-level", int, 0, "which timers are reported: 0, 1, 2"),
    Flag(
        "--timing-log-option", str, "minmax", "over which ranks", choices=("max", "minmax", "all")
    ),
    Flag(
        "--no-barrier-with-level-1-timing",
        False,
        True,
        "no barrier around level 1 timers",
        dest="barrier_with_L1_time",
    ),
    Flag("--tensorboard-dir", str, None, "write TensorBoard files here"),
    Flag("--tensorboard-log-interval", int, 1, "iterations between TensorBoard values"),
    Flag("--tensorboard-queue-size", int, 1000, "values that may wait to be written"),
    Flag("--log-timers-to-tensorboard", True, False, "timers to TensorBoard"),
    Flag(
        "--no-log-loss-scale-to-tensorboard",
        False,
        True,
        "no loss scale in TensorBoard",
        dest="log_loss_scale_to_tensorboard",
    ),
    Flag("--log-validation-ppl-to-tensorboard", True, False, "perplexity to TensorBoard"),
    Flag("--log-memory-to-tensorboard", True, False, "device memory to TensorBoard"),
    Flag("--log-world-size-to-tensorboard", True, False, "number of ranks to TensorBoard"),
    Flag("--log-memory-interval", int, None, "iterations between memory reports"),
    Flag("--wandb-project", str, None, "Weights & Biases project"),
    Flag("--wandb-exp-name", str, "", "Weights & Biases run name"),
    Flag("--wandb-save-dir", str, "", "where Weights & Biases keeps its files"),
    Flag("--wandb-entity", str, None, "Weights & Biases entity"),
    Flag("--logging-level", int, None, "level of Python's logging"),
    Flag("--profile", True, False, "profile with --use-pytorch-profiler"),
    Flag("--use-pytorch-profiler", True, False, "PyTorch's profiler between the two steps below"),
    Flag("--profile-step-start", int, 10, "first profiled iteration"),
    Flag("--profile-step-end", int, 12, "iteration after the last profiled one"),
    Flag("--profile-ranks", int, (0,), "ranks that are profiled", nargs="+"),
)

CHECKPOINT = (
    Flag("--save", str, None, "directory of checkpoints to write"),
    Flag("--save-interval", int, None, "iterations between checkpoints"),
    Flag("--save-retain-interval", int, None, "keep these checkpoints, delete the others"),
    Flag("--load", str, None, "directory of checkpoints to read"),
    Flag("--pretrained-checkpoint", str, None, "start from this model when --load holds nothing"),
    Flag("--ckpt-step", int, None, "iteration to load instead of the latest"),
    Flag("--ckpt-format", str, "torch_dist", "format", choices=("torch_dist", "torch")),
    Flag("--auto-detect-ckpt-format", True, False, "find the format of the checkpoint out"),
    Flag("--no-save-optim", True, None, "leave the optimizer out when saving"),
    Flag("--no-save-rng", True, None, "leave the random state out when saving"),
    Flag("--no-load-optim", True, None, "leave the optimizer out when loading"),
    Flag("--no-load-rng", True, None, "leave the random state out when loading"),
    Flag("--finetune", True, False, "load the model alone and start at iteration 0"),
    Flag("--exit-on-missing-checkpoint", True, False, "an empty --load directory is an error"),
    Flag("--use-checkpoint-args", True, False, "take the model's shape from the checkpoint"),
    Flag("--async-save", True, False, "write checkpoints in the background"),
    Flag("--use-persistent-ckpt-worker", True, False, "one background writer for the whole run"),
    Flag(
        "--no-ckpt-fully-parallel-save",
        False,
        True,
        "one data-parallel replica writes",
        dest="ckpt_fully_parallel_save",
    ),
    Flag("--ckpt-fully-parallel-load", True, False, "replicas share the reading"),
    Flag("--ckpt-assume-constant-structure", True, False, "reuse the plan of the first save"),
    Flag(
        "--dist-ckpt-strictness",
        str,
        "assume_ok_unexpected",
        "what a mismatch of keys does",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    ),
    Flag(
        "--dist-ckpt-optim-fully-reshardable", True, False, "optimizer state for any later layout"
    ),
    Flag(
        "--distrib-optim-fully-reshardable-mem-efficient", True, False, "the same with less memory"
    ),
)

OURS = (
    Flag("--use-dpp", True, False, "dynamic pipeline: every rank picks its next task itself"),
    Flag("--dpp-plan", str, None, "plan the layout from `shapes`, a traced run or a cost file"),
    Flag("--device", str, "auto", "run on", choices=("auto", "cpu", "cuda")),
    Flag("--metrics-file", str, None, "append one JSON line per iteration to this file"),
    Flag("--estimate", True, False, "print what the run should need, then what it did"),
    Flag("--trace", True, False, "record what every rank does"),
    Flag("--trace-dir", str, "benchmark", "directory of traces"),
    Flag("--trace-interval", int, 1, "record every n-th iteration"),
    Flag("--trace-iterations", str, None, "record these iterations only, like 3,10-12"),
    Flag("--trace-granularity", str, "full", "accepted for old scripts: one granularity exists"),
    Flag(
        "--continuous-trace-iterations",
        int,
        1,
        "iterations recorded in a row from each --trace-interval",
    ),
    Flag(
        "--forward-backward-disaggregating", True, False, "accepted for old scripts: has no effect"
    ),
    Flag(
        "--ignore-forward-tensor-parallel", True, False, "accepted for old scripts: has no effect"
    ),
    Flag("--num-gpus", int, None, "accepted for old scripts: torchrun decides"),
    Flag("--multi-node", True, False, "the job spans several nodes; refused when it does not"),
)

GROUPS = {
    "model": MODEL,
    "training": TRAINING,
    "optimizer": OPTIMIZER,
    "distributed": DISTRIBUTED,
    "data": DATA,
    "logging": LOGGING,
    "checkpoints": CHECKPOINT,
    "dynamic pipeline": OURS,
}

WITHOUT_EFFECT = (
    "use_flash_attn",
    "scatter_gather_tensors_in_pipeline",
    "calc_ft_timeouts",
    "trace_granularity",
    "forward_backward_disaggregating",
    "ignore_forward_tensor_parallel",
    "num_gpus",
    "decoder_seq_length",
    "log_timers_to_tensorboard",
    "continuous_trace_iterations",
    "enable_experimental",
    "openai_gelu",
    # Not read by Megatron-LM core_v0.16.1 either, whose numbers and checkpoints are the measure.
    "rotary_seq_len_interpolation_factor",
    "rope_scaling_factor",
)
"""Destinations that are accepted and change nothing; setting one is answered with a warning."""

UNSET_FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "params_dtype",
    "enable_autocast",
    "variable_seq_lengths",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "deallocate_pipeline_outputs",
    "cpu_offloading",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "gated_linear_unit",
    "bias_activation_fusion",
    "test_mode",
    "persist_layer_norm",
    "num_moe_experts",
    "fp8_param",
    "num_microbatches_with_partial_activation_checkpoints",
    "inference_sampling_seed",
    "use_te_rng_tracker",
    "grad_reduce_in_fp32",
    "check_for_nan_in_grad",
    "bucket_size",
    "pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation",
    "average_in_collective",
    "random_seed",
    "sequence_length",
    "path_to_cache",
    "mock",
    "fast_cache_load",
    "defer_npy_index_mmap",
    "create_attention_mask",
    "data_parallel_size",
    "sequence_parallel_size",
    "token_dtype_code",
    "masking_probability",
    "short_sequence_probability",
    "classification_head",
    "timers",
)
"""Dataclass fields that are derived, or set by a flag of another name."""
