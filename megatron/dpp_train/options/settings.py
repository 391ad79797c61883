"""The settings of a run, as a summary and as a file that ``--yaml-cfg`` reads.

The file holds the settings that differ from the defaults, and as comments the derived values and
the defaults.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp.schedule import chosen_policy
from megatron.dpp_train.options.arguments import build_parser
from megatron.dpp_train.options.run_config import RunConfig

FILE_NAME = "settings.yaml"


def summary(args: RunConfig, task_name: str) -> str:
    """Model, precision, layout, batch, length and schedule on three lines."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    layout = [f"PP{args.pipeline_model_parallel_size}"]
    layout += [f"{chunks} chunks"] if chunks > 1 else []
    layout += [
        f"{name}{size}"
        for name, size in (
            ("TP", args.tensor_model_parallel_size),
            ("CP", args.context_parallel_size),
            ("EP", args.expert_model_parallel_size),
            ("DP", args.data_parallel_size),
        )
        if size > 1
    ]
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    length = f"{args.train_samples} samples" if args.train_samples else f"{args.train_iters} steps"
    used = {
        "distributed optimizer": args.use_distributed_optimizer,
        f"DeepSpeed's engine with ZeRO {args.deepspeed_zero_stage}": args.deepspeed_zero_stage,
        "sequence parallel": args.sequence_parallel,
        f"recompute {args.recompute_granularity}": args.recompute_granularity,
        "overlapped reduction": args.overlap_grad_reduce,
    }
    return (
        f"{task_name}: {args.num_layers} layers of {args.hidden_size}, {args.num_attention_heads} "
        f"heads, sequence {args.seq_length}, vocabulary {args.padded_vocab_size}, {precision}, "
        f"{args.transformer_impl} layers\n"
        f"layout: {' x '.join(layout)} on {args.device}"
        f"{''.join(f', {name}' for name, on in used.items() if on)}; "
        f"{_schedule(args)}\n"
        f"training: {length} of {args.global_batch_size} samples = {microbatches} "
        f"microbatch{'' if microbatches == 1 else 'es'} of {args.micro_batch_size}, "
        f"{args.optimizer}, learning rate {args.lr} {args.lr_decay_style}"
        f"{_sequences(args)}"
    )


def _schedule(args: RunConfig) -> str:
    if not args.use_dpp:
        return "static schedule"
    if args.dpp_replay:
        return f"dynamic pipeline, order of --dpp-replay {args.dpp_replay}"
    policy = chosen_policy(args.dpp_policy, args.pipeline_model_parallel_size)
    return f"dynamic pipeline, policy {policy}"


def _sequences(args: RunConfig) -> str:
    """A line on samples of unlike length."""
    if not args.variable_lengths:
        return ""
    weight = "token" if args.calculate_per_token_loss else "sequence"
    packing = "not packed"
    if args.packing != "none":
        packing = f"packed {args.packing} into up to {args.packing_budget} tokens"
    return (
        f"\nsequences: {'chats' if args.sft else 'documents'} of up to {args.seq_length} tokens, "
        f"{packing}, order {args.order}; every {weight} has the same weight in the loss"
    )


def save(args: RunConfig, folder: Path) -> Path:
    """Write the settings into ``folder``; an earlier run's file there is replaced.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    scratch = path.with_suffix(".new")
    with open_text_to_write(scratch) as file:
        file.write(text(args))
    scratch.replace(path)
    return path


def text(args: RunConfig) -> str:
    """The file's content."""
    defaults = {a.dest: a.default for a in build_parser()._actions if a.dest != "help"}
    chosen, derived, rest = [], [], []
    for name, default in sorted(defaults.items()):
        given, now = args.parsed.get(name, default), getattr(args, name, default)
        if name != "yaml_cfg" and _plain(given) != _plain(default):
            chosen.append(_line(name, given))
        if _plain(now) != _plain(given):
            derived.append("# " + _line(name, now))
        elif _plain(given) == _plain(default):
            rest.append("# " + _line(name, default))
    for name in (
        *("data_parallel_size", "virtual_pipeline_model_parallel_size", "params_dtype"),
        "loss_vocab_size",
    ):
        derived.append("# " + _line(name, getattr(args, name, None)))
    derived.append("# " + _line("working_directory", str(Path.cwd())))
    parts = ["# Settings of this run, for --yaml-cfg.", *chosen, "", "# Derived:", *derived]
    return "\n".join([*parts, "", "# Defaults:", *rest]) + "\n"


def _line(name: str, value: Any) -> str:
    # JSON is YAML, and puts every value on one line.
    return f"{name}: {json.dumps(_plain(value))}"


def _plain(value: Any) -> Any:
    """As YAML writes it: names of enumerations and dtypes, lists for tuples."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
