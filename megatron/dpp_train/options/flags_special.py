"""Flags with a notation of their own, old names, and answers to flags that are not supported.

A table beside ``flags``: layer patterns, mixture of experts, multi-latent attention, and names that
Megatron-LM keeps for old scripts. :func:`answer` explains a flag that only Megatron-LM has.
"""

from __future__ import annotations

import argparse
import ast
import re

from megatron.dpp_train.options.flags import Flag, off, on

_WINDOW = re.compile(r"[(\[]?\s*-?\d+(\s*,\s*-?\d+)*\s*,?\s*[)\]]?")
_PATTERN = re.compile(r"[\d,\[\]()+*\s]+")


def integers(text: str) -> tuple[int, ...]:
    """``8,0``, ``(8,0)`` or ``[8,0]`` (a YAML file's list) as numbers."""
    if not _WINDOW.fullmatch(text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers like 8,0")
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def pattern(text: str) -> int | list[int]:
    """Every how many layers (``4``), or one number per layer, like ``([1]*3+[0])*2``."""
    if text.strip().isdigit():
        return int(text)
    if not _PATTERN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number or a list like ([1]*3+[0])*2"
        )
    try:
        value = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return value


def _evaluated(node: ast.expr) -> int | list[int]:
    """Lists of numbers, their sums and multiples; nothing else is a pattern."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [int(ast.literal_eval(element)) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left + right  # type: ignore
    raise ValueError("only lists of numbers, + and * make a pattern")


PATTERNS = (
    Flag("--window-size", integers, None, "attention window to the left and right, like 128,0"),
    Flag("--window-attn-skip-freq", pattern, None,
        "layers without the window: every N-th, or 1 (window) and 0 per layer"),
    Flag("--no-rope-freq", pattern, None, "layers without rotary embedding: every N-th, or 1s"),
    Flag("--moe-layer-freq", pattern, 1, "layers with experts: every N-th, or 1s"),
    Flag("--moe-router-load-balancing-type", str, "aux_loss", "method that balances the experts",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"), nargs="+"),
    Flag("--moe-aux-loss-coeff", float, 0.0, "weight of the balancing loss", nargs="+"),
)  # fmt: skip

FORMS = (
    on("--geglu", "gated GELU, by tanh, instead of GELU"),
    on("--output-norms", "norms of what attention and MLP add to a token"),
    off("--no-input-norms", "input_norms", "no norms before attention and MLP"),
    on("--qk-norm-over-heads", "--qk-layernorm over all heads together, not over each"),
    Flag("--embedding-scale", float, 1.0, "factor of the embedding"),
    Flag("--residual-scale", float, 1.0, "factor of what attention and MLP add to a token"),
    Flag("--logit-scale", float, 1.0, "factor of the logits"),
    Flag("--window-rotary-base", int, None, "rotary base of layers with a window, unscaled"),
)  # fmt: skip

LATENT_ATTENTION = (
    Flag("--q-lora-rank", int, None, "rank of the queries' low-rank projection"),
    Flag("--kv-lora-rank", int, 32, "rank of the keys' and values' low-rank projection"),
    Flag("--qk-head-dim", int, 128, "size of a query and key head without position"),
    Flag("--qk-pos-emb-head-dim", int, 64, "size of their rotary part"),
    Flag("--v-head-dim", int, 128, "size of a value head"),
    Flag("--rotary-scaling-factor", float, 1.0, "factor by which YaRN stretches positions"),
    Flag("--mscale", float, 1.0, "YaRN's attention scaling"),
    Flag("--mscale-all-dim", float, 0.0, "the same over all dimensions"),
    Flag("--rope-type", str, None, "kind of rotary embedding", choices=("rope", "yarn")),
)  # fmt: skip

OLD_NAMES = (
    Flag("--spec", str, None, "local: same as --transformer-impl local", nargs="+"),
    Flag("--encoder-num-layers", int, None, "older name of --num-layers"),
    off("--no-position-embedding", "add_position_embedding",
        "no effect with --position-embedding-type rope"),
    off("--disable-manual-gc-eval", "manual_gc_eval", "--no-manual-gc-eval"),
    off("--disable-ckpt-fully-parallel-save", "ckpt_fully_parallel_save",
        "--no-ckpt-fully-parallel-save"),
    off("--disable-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard",
        "--no-log-loss-scale-to-tensorboard"),
    on("--ckpt-fully-parallel-save", "accepted for old scripts: it is the default",
        dest="ckpt_fully_parallel_save_deprecated"),
    on("--use-dist-ckpt", "accepted for old scripts: --ckpt-format decides",
        dest="use_dist_ckpt_deprecated"),
    Flag("--persistent-save-interval", int, None, "--save-interval", dest="save_interval"),
    Flag("--no-weight-decay-cond-type", str, None, "--apply-wd-to-qk-layernorm",
        choices=("apply_wd_to_qk_layernorm",)),
    on("--use-nccl-ub", "--nccl-ub", dest="nccl_ub"),
    on("--no-one-logger", "accepted for old scripts: there is no one-logger here"),
    on("--disable-msc", "accepted for old scripts: files are read directly"),
    on("--enable-experimental", "accepted; has no effect here"),
    on("--openai-gelu", "accepted; only Megatron-LM's legacy models read it"),
)  # fmt: skip

SPECIAL = {
    "patterns and mixture of experts": PATTERNS,
    "forms of layers": FORMS,
    "multi-latent attention": LATENT_ATTENTION,
    "old names": OLD_NAMES,
}

_REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--dist-ckpt-format": "--ckpt-format",
}

_ELSEWHERE = {
    "reinforcement learning": ("--rl-", "--grpo-", "--langrl-", "--perform-rl-step", "--refit-"),
    "inference": (
        "--inference-", "--enable-chunked-prefill", "--disable-chunked-prefill", "--max-tokens-to-",
        "--nccl-all-reduce-for-prefill", "--decode-only-", "--use-legacy-static-engine",
        "--output-bert-embeddings", "--bert-embedder-type",
    ),
    "vision models": (
        "--vision-", "--dino-", "--swin-", "--img-", "--num-classes", "--num-channels",
        "--patch-dim", "--mask-type", "--mask-factor", "--classes-fraction", "--iter-per-epoch",
    ),
    "retrieval models": (
        "--ict-", "--biencoder-", "--bert-load", "--titles-", "--query-in-", "--evidence-",
        "--retriever-", "--block-data-", "--embedding-path", "--indexer-", "--use-one-sent-docs",
    ),
    "encoder-decoder models": ("--decoder-num-layers", "--relative-attention-"),
    "Mamba and hybrid models": ("--hybrid-", "--heterogeneous-", "--linear-attention-"),
    "Megatron-LM's legacy models": ("--use-legacy-models", "--onnx-safe"),
    "fine-tuning": ("--fim-", "--moe-use-upcycling", "--moe-upcycling-"),
    "other tokenizers": ("--tokenizer-", "--tiktoken-", "--trust-remote-code"),
    "restarts inside a process": ("--inprocess-", "--enable-ft-package", "--ft-", "--adlr-"),
    "checking a step by running it again": ("--rerun-mode", "--error-injection-", "--result-"),
    "its straggler log (here: --trace and megatron-dpp report)": (
        "--log-straggler", "--straggler-", "--disable-straggler-", "--run-workload-",
    ),
    "checkpoints between checkpoints": ("--non-persistent-", "--replication"),
    "several validation sets": ("--multiple-validation-sets",),
    "conversion of checkpoint formats": ("--ckpt-convert-", "--dist-ckpt-save-pre-"),
}  # fmt: skip


def answer(name: str) -> str | None:
    """The reason why a flag of Megatron-LM is missing; None for a name that it lacks, too."""
    if name in _REPLACED:
        return f"{name} is an old name; use {_REPLACED[name]}"
    for subject, starts in _ELSEWHERE.items():
        if name.startswith(starts):
            return f"{name} belongs to a part of Megatron-LM that is not built here: {subject}"
    return None
