"""Flags of what is around the training: data, logging, checkpoints, and ours.

A table like ``flags``, whose names, defaults and destinations are Megatron-LM's, too, but for the
last group. The flags of :class:`megatron.dpp.config.DppConfig` are not here: ``arguments`` makes
them from its fields.
"""

from __future__ import annotations

from megatron.dpp.cli.flags import Flag

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
    Flag("--masking-max-ngram", int, 3, "BERT: words that are masked together at most"),
    Flag(
        "--no-masking-do-full-word",
        False,
        True,
        "BERT: mask parts of words",
        dest="masking_do_full_word",
    ),
    Flag("--masking-do-permutation", True, False, "BERT: shuffle words, too"),
    Flag("--masking-use-longer-ngrams", True, False, "BERT: rather mask more words together"),
    Flag(
        "--masking-use-geometric-distribution",
        True,
        False,
        "BERT: words that are masked together, as SpanBERT draws them",
    ),
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
    Flag("--auto-detect-ckpt-format", True, False, "accepted: the format is always found out"),
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
    Flag("--trace-iterations", str, None, "record these iterations only, like 3,10-12 (from 0)"),
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

RUN_GROUPS = {
    "data": DATA,
    "logging": LOGGING,
    "checkpoints": CHECKPOINT,
    "dynamic pipeline": OURS,
}
