"""Flags of Megatron-LM that are no field of a megatron-core dataclass, or are spelt differently.

A table: name, type, default, help; names, defaults and destinations are those of Megatron-LM
core_v0.16.1, of ``--yarn-*`` those of core_v0.19.0. Here are the model's and its training's;
``flags_run`` has those of the run around it. ``arguments`` turns the rows into a parser and adds
the generated flags.
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


def on(name: str, help: str, dest: str | None = None) -> Flag:
    """A switch that is off by default."""
    return Flag(name, True, False, help, dest)


def off(name: str, dest: str, help: str) -> Flag:
    """A switch that turns ``dest`` off, which is on by default."""
    return Flag(name, False, True, help, dest)


MODEL = (
    Flag("--max-position-embeddings", int, None, "longest sequence the position embedding knows"),
    Flag("--position-embedding-type", str, "learned_absolute", "position embedding",
        choices=("learned_absolute", "rope", "yarn", "none")),
    on("--use-rotary-position-embeddings", "old name of --position-embedding-type rope"),
    Flag("--rotary-base", int, 10000, "base of the rotary embedding"),
    Flag("--rotary-percent", float, 1.0, "share of a head that is rotated"),
    Flag("--rotary-seq-len-interpolation-factor", int, None,
        "stretch rotary positions by this factor"),
    on("--use-rope-scaling", "scale rotary frequencies as Llama 3 does"),
    Flag("--rope-scaling-factor", float, 8.0, "factor of --use-rope-scaling"),
    Flag("--yarn-original-max-position-embeddings", int, None,
        "longest sequence before YaRN's scaling"),
    Flag("--yarn-beta-fast", float, 32.0, "turns above which YaRN keeps a frequency"),
    Flag("--yarn-beta-slow", float, 1.0, "turns below which YaRN divides it by the whole factor"),
    Flag("--yarn-correction-range-round-to-int", True, True, "round the bounds between the two"),
    off("--no-yarn-correction-range-round-to-int", "yarn_correction_range_round_to_int",
        "do not round them"),
    Flag("--make-vocab-size-divisible-by", int, 128,
        "pad the vocabulary to a multiple of this per rank"),
    on("--group-query-attention", "share keys and values between groups of heads"),
    on("--swiglu", "gated SiLU instead of GELU"),
    on("--squared-relu", "squared ReLU instead of GELU"),
    on("--quick-geglu", "gated quick GELU instead of GELU"),
    off("--bert-no-binary-head", "bert_binary_head", "BERT without its binary head"),
    on("--untie-embeddings-and-output-weights", "separate output weights"),
    Flag("--num-experts", int, None, "experts per mixture-of-experts layer"),
    Flag("--family", str, None, "layers of this family, which another one's flags do not say"),
    Flag("--family-file", str, None, "Python file with a further family of models"),
    on("--init-method-xavier-uniform", "Xavier uniform initialisation"),
    off("--no-masked-softmax-fusion", "masked_softmax_fusion", "unfused attention softmax"),
    off("--no-bias-gelu-fusion", "bias_gelu_fusion", "unfused bias and GELU"),
    off("--no-bias-swiglu-fusion", "bias_swiglu_fusion", "unfused bias and SwiGLU"),
    off("--no-bias-dropout-fusion", "bias_dropout_fusion", "unfused bias and dropout"),
    off("--no-rope-fusion", "apply_rope_fusion", "unfused rotary embedding"),
    on("--attention-softmax-in-fp32", "attention softmax in fp32"),
    on("--no-persist-layer-norm", "no persistent layer norm kernel"),
    off("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion",
        "no fused gradient accumulation"),
    on("--recompute-activations", "same as --recompute-granularity selective"),
    on("--fp16-lm-cross-entropy", "cross entropy in fp16"),
    on("--use-flash-attn", "flash attention where the implementation has it"),
    on("--use-mcore-models", "accepted for old scripts: these are the only models",
        dest="deprecated_use_mcore_models"),
    on("--disable-jit-fuser", "do not compile small functions"),
)  # fmt: skip

TRAINING = (
    Flag("--micro-batch-size", int, None, "samples of one microbatch on one data-parallel rank"),
    Flag("--global-batch-size", int, None, "samples per iteration over all ranks"),
    Flag("--rampup-batch-size", int, None, "start size, increment, samples of the ramp", nargs=3),
    on("--decrease-batch-size-if-needed", "round the batch size down when it does not divide"),
    Flag("--train-iters", int, None, "iterations of all runs together"),
    Flag("--train-samples", int, None, "samples of all runs together, instead of --train-iters"),
    Flag("--exit-interval", int, None, "save and leave after an iteration that this divides"),
    Flag("--exit-duration-in-mins", int, None, "save and leave after this many minutes"),
    on("--exit-signal-handler", "save and leave on SIGTERM"),
    Flag("--empty-unused-memory-level", int, 0, "return cached device memory: 0 never, 1, 2"),
    Flag("--check-weight-hash-across-dp-replicas-interval", int, None,
        "compare the parameters of data-parallel replicas this often"),
    Flag("--train-sync-interval", int, None, "wait for the device this often"),
    Flag("--iterations-to-skip", int, None, "iterations whose data is skipped", nargs="+"),
    on("--manual-gc", "collect garbage only where asked"),
    Flag("--manual-gc-interval", int, 0, "iterations between manual collections"),
    off("--no-manual-gc-eval", "manual_gc_eval", "no manual collection around evaluation"),
    off("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad",
        "do not stop on NaN"),
    on("--check-for-large-grads", "stop on unexpectedly large gradients"),
    on("--check-for-spiky-loss", "report a loss ten times above its recent values"),
    Flag("--seed", int, 1234, "seed of everything random"),
    on("--data-parallel-random-init", "initialise replicas differently, then broadcast"),
    on("--te-rng-tracker", "Transformer Engine's random state tracker"),
    on("--calc-ft-timeouts", "accepted; has no effect here"),
    Flag("--yaml-cfg", str, None, "file of settings; the command line wins over it"),
)  # fmt: skip

OPTIMIZER = (
    Flag("--optimizer", str, "adam", "optimizer", choices=("adam", "sgd")),
    Flag("--lr", float, None, "highest learning rate"),
    Flag("--min-lr", float, 0.0, "lowest learning rate"),
    Flag("--lr-decay-style", str, "linear", "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")),
    Flag("--lr-wsd-decay-style", str, "exponential", "annealing of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt")),
    Flag("--lr-decay-iters", int, None, "iterations of the learning rate's decay"),
    Flag("--lr-decay-samples", int, None, "samples of the learning rate's decay"),
    Flag("--lr-wsd-decay-iters", int, None, "iterations of WSD's annealing"),
    Flag("--lr-wsd-decay-samples", int, None, "samples of WSD's annealing"),
    Flag("--lr-warmup-fraction", float, None, "share of the decay spent warming up"),
    Flag("--lr-warmup-iters", int, 0, "iterations of linear warm-up"),
    Flag("--lr-warmup-samples", int, 0, "samples of linear warm-up"),
    Flag("--lr-warmup-init", float, 0.0, "learning rate where warm-up starts"),
    on("--override-opt_param-scheduler", "schedule from flags, not from the checkpoint",
        dest="override_opt_param_scheduler"),
    on("--use-checkpoint-opt_param-scheduler", "schedule from the checkpoint, not from flags",
        dest="use_checkpoint_opt_param_scheduler"),
    Flag("--start-weight-decay", float, None, "weight decay at the start"),
    Flag("--end-weight-decay", float, None, "weight decay at the end"),
    Flag("--weight-decay-incr-style", str, "constant", "shape of the weight decay's growth",
        choices=("constant", "linear", "cosine")),
    Flag("--optimizer-offload-fraction", float, 1.0,
        "share of the optimizer state kept on the host"),
    off("--no-pin-cpu-grads", "pin_cpu_grads", "unpinned host gradients"),
    off("--no-pin-cpu-params", "pin_cpu_params", "unpinned host parameters"),
    Flag("--main-grads-dtype", str, "fp32", "dtype of main gradients", choices=("fp32", "bf16")),
    Flag("--main-params-dtype", str, "fp32", "dtype of main parameters", choices=("fp32", "fp16")),
    Flag("--exp-avg-dtype", str, "fp32", "dtype of Adam's mean",
        choices=("fp32", "fp16", "bf16", "fp8")),
    Flag("--exp-avg-sq-dtype", str, "fp32", "dtype of Adam's variance",
        choices=("fp32", "fp16", "bf16", "fp8")),
    on("--grad-reduce-in-bf16", "reduce gradients in bf16"),
    on("--accumulate-allreduce-grads-in-fp32", "accumulate and reduce gradients in fp32"),
)  # fmt: skip

DISTRIBUTED = (
    Flag("--distributed-backend", str, "nccl", "torch.distributed backend",
        choices=("nccl", "gloo")),
    Flag("--distributed-timeout-minutes", int, 10, "timeout of collectives"),
    Flag("--num-layers-per-virtual-pipeline-stage", int, None, "layers of one chunk"),
    Flag("--num-virtual-stages-per-pipeline-rank", int, None, "chunks per pipeline rank"),
    Flag("--pipeline-model-parallel-layout", str, None,
        'layers of each stage as text, for example "Et*3|tt|tt|tL"'),
    Flag("--decoder-first-pipeline-num-layers", int, None, "layers on the first pipeline rank"),
    Flag("--decoder-last-pipeline-num-layers", int, None, "layers on the last pipeline rank"),
    off("--no-overlap-p2p-communication", "overlap_p2p_comm",
        "static interleaved schedule without overlap"),
    on("--overlap-grad-reduce", "reduce gradients while the backward runs"),
    off("--no-align-grad-reduce", "align_grad_reduce", "stages reduce gradients independently"),
    Flag("--ddp-num-buckets", int, None, "buckets of the gradient reduction"),
    on("--use-torch-fsdp2", "shard parameters, gradients and optimizer (FSDP2)"),
    off("--torch-fsdp2-no-reshard-after-forward", "torch_fsdp2_reshard_after_forward",
        "keep gathered parameters until the backward has used them"),
    Flag("--deepspeed-zero-stage", int, None,
        "train with DeepSpeed's engine: shard the optimizer (1), gradients (2), parameters (3)",
        choices=(1, 2, 3)),
    Flag("--ddp-bucket-size", int, None, "parameters per bucket"),
    on("--ddp-pad-buckets-for-high-nccl-busbw", "pad buckets to a multiple of 2^16"),
    on("--ddp-reduce-scatter-with-fp32-accumulation", "sum in fp32 what travels in bf16"),
    on("--ddp-average-in-collective", "average inside the collective"),
    off("--no-align-param-gather", "align_param_gather", "stages gather parameters independently"),
    off("--no-scatter-gather-tensors-in-pipeline", "scatter_gather_tensors_in_pipeline",
        "accepted for old scripts"),
    off("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion",
        "divide gradients apart from the reduction"),
    Flag("--cp-comm-type", str, ("p2p",), "exchange between context-parallel ranks", nargs="+",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p")),
    on("--use-tp-pp-dp-mapping", "rank order tp-cp-ep-pp-dp"),
    off("--disable-gloo-process-groups", "enable_gloo_process_groups", "no extra gloo groups"),
    Flag("--nccl-communicator-config-path", str, None, "YAML file of NCCL communicator settings"),
    Flag("--high-priority-stream-groups", str, (),
        "process groups (tp, dp, ...) whose NCCL kernels come first on a GPU", nargs="*"),
    Flag("--local-rank", int, None, "rank on this host; torchrun's LOCAL_RANK wins"),
)  # fmt: skip

GROUPS = {
    "model": MODEL,
    "training": TRAINING,
    "optimizer": OPTIMIZER,
    "distributed": DISTRIBUTED,
}

WITHOUT_EFFECT = (
    "use_flash_attn", "scatter_gather_tensors_in_pipeline", "calc_ft_timeouts", "trace_granularity",
    "forward_backward_disaggregating", "ignore_forward_tensor_parallel", "num_gpus",
    "decoder_seq_length", "continuous_trace_iterations", "enable_experimental", "openai_gelu",
)  # fmt: skip
"""Destinations that are accepted and change nothing; a run warns of one that is given."""

UNSET_FIELDS = (
    "virtual_pipeline_model_parallel_size", "params_dtype", "enable_autocast",
    "variable_seq_lengths", "batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs",
    "cpu_offloading", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "gated_linear_unit", "bias_activation_fusion", "test_mode", "persist_layer_norm",
    "num_moe_experts", "fp8_param", "num_microbatches_with_partial_activation_checkpoints",
    "inference_sampling_seed", "use_te_rng_tracker", "grad_reduce_in_fp32", "check_for_nan_in_grad",
    "bucket_size", "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation",
    "average_in_collective", "random_seed", "sequence_length", "path_to_cache", "mock",
    "fast_cache_load", "defer_npy_index_mmap", "create_attention_mask", "data_parallel_size",
    "sequence_parallel_size", "token_dtype_code", "masking_probability", "masking_max_ngram",
    "masking_do_full_word", "masking_do_permutation", "masking_use_longer_ngrams",
    "masking_use_geometric_distribution", "multiple_validation_sets", "short_sequence_probability",
    "classification_head", "timers",
)  # fmt: skip
"""Dataclass fields that are derived, or set by a flag of these tables."""
