"""The command line of ``pretrain_gpt.py`` and ``pretrain_bert.py``.

Rows of ``flags``, ``flags_run`` and ``flags_special`` first, then ours from
:class:`megatron.dpp.config.DppConfig`, then one flag per remaining field of megatron-core's
dataclasses. This module turns text into a namespace; ``validate`` checks the values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.dpp.config import option_fields
from megatron.dpp.errors import require
from megatron.dpp.flags import Parser, add_dpp_flags, given_flags, refuse_unknown
from megatron.dpp_train.options.fields import add_flags, core_fields
from megatron.dpp_train.options.flags import GROUPS, UNSET_FIELDS, WITHOUT_EFFECT, Flag
from megatron.dpp_train.options.flags_run import RUN_GROUPS
from megatron.dpp_train.options.flags_special import SPECIAL, answer
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.options.yaml_file import defaults_from_yaml


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    """The parser with every flag. All callers share it, so none may change it."""
    return _new_parser()


def _new_parser() -> argparse.ArgumentParser:
    parser = Parser(
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Layouts: megatron-dpp train --help. Pages: docs/flags.md, docs/training.md",
    )
    for title, rows in (GROUPS | RUN_GROUPS | SPECIAL).items():
        group = parser.add_argument_group(title)
        for row in rows:
            _add_row(group, row)
    add_dpp_flags(parser)
    for name, fields in core_fields().items():
        add_flags(parser, fields, skip=UNSET_FIELDS, title=f"megatron-core {name}")
    return parser


def _add_row(group: Any, row: Flag) -> None:
    names = [row.name]
    if row.name.startswith("--override-opt_param") or row.name.startswith("--use-checkpoint-opt_"):
        names.append(row.name.replace("_", "-"))
    options: dict[str, Any] = {"default": row.default, "help": row.help.replace("%", "%%")}
    if row.dest:
        options["dest"] = row.dest
    if isinstance(row.kind, bool):
        options["action"] = "store_true" if row.kind else "store_false"
    else:
        options |= {"type": row.kind, "choices": row.choices, "nargs": row.nargs}
    group.add_argument(*names, **options)


def parse_args(argv: Sequence[str] | None = None) -> Settings:
    """Parse a command line (``sys.argv`` by default).

    Settings of ``--yaml-cfg`` come below the command line's and above the defaults.

    Raises:
        ConfigError: an unknown flag (with the nearest match), or a value of the wrong type.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if {"-h", "--help", "--help-all"} & set(argv):
        if rank_and_world()[0] == 0:
            print(parser.format_help() if "--help-all" in argv else _short_help(parser))
        raise SystemExit(0)
    path = _yaml_path(argv)
    if path:
        parser = _new_parser()  # not the one that all share
        parser.set_defaults(**defaults_from_yaml(path, parser))
    found, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown, answer)
    values = vars(found)
    return Settings.of(values, given_flags(parser, argv), dict(values))


def give(args: Settings, flags: Mapping[str, Any]) -> None:
    """Add flags with values of their own type to parsed ``args``, as if they had been given.

    Args:
        flags: as the command line spells them; a switch has the value True.
    """
    options = build_parser()._option_string_actions
    for name, value in flags.items():
        action = options[name]
        found = action.const if action.nargs == 0 else value
        if action.nargs not in (0, None) and not isinstance(found, list):
            found = [found]
        setattr(args, action.dest, found)
        args.given[action.dest] = name
        args.parsed[action.dest] = found


_IN_SHORT = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
    "micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "bf16", "fp16",
    "data_path", "split", "tokenizer_type", "vocab_file", "merge_file",
    "tokenizer_model",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "use_dpp", "dpp_policy", "dpp_activation_cap", "save",
    "load", "save_interval", "eval_interval", "trace", "metrics_file", "tensorboard_dir", "device",
    "yaml_cfg",
)  # fmt: skip


def _short_help(parser: argparse.ArgumentParser) -> str:
    """The flags of most runs, a line each."""
    lines = [f"usage: {parser.prog} FLAGS", ""]
    first = {action.dest: action for action in reversed(parser._actions)}  # not what else sets it
    for action in parser._actions:
        if action.dest in _IN_SHORT and first[action.dest] is action:
            text = (action.help or "").split("; ")[0].replace("%%", "%")
            text = textwrap.shorten(text, 78, placeholder=" ...")
            lines.append(f"  {action.option_strings[0]:40s} {text}")
    total = len(parser._actions)
    return "\n".join([*lines, "", f"--help-all lists all {total} flags, docs/flags.md the rest."])


def _yaml_path(argv: list[str]) -> str | None:
    finder = Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--yaml-cfg")
    path: str | None = finder.parse_known_args(argv)[0].yaml_cfg
    return path


def warnings_of(args: RunConfig) -> list[str]:
    """A line for every given flag without effect."""
    lines = [f"{args.given[name]} has no effect" for name in WITHOUT_EFFECT if name in args.given]
    lines += [*_skipped_by_loss_scale(args), *_dropped_in_slices(args)]
    for field in option_fields():
        flag = args.given.get(f"dpp_{field.name}")
        why = _why_idle(args, field) if flag else None
        if why:
            lines.append(f"{flag} {why}")
    return lines


_USUAL_LOSS_SCALE = 65536


def _skipped_by_loss_scale(args: RunConfig) -> list[str]:
    """A line where the initial loss scale may overflow in every iteration of a short run."""
    if not args.fp16 or args.loss_scale or not args.train_iters:
        return []
    halvings = math.log2(max(args.initial_loss_scale / _USUAL_LOSS_SCALE, 1))
    skipped = math.ceil(halvings) + args.hysteresis - 1
    if not halvings or skipped < args.train_iters / 10:
        return []
    return [
        f"--initial-loss-scale {args.initial_loss_scale:.0f}: each iteration that overflows is "
        f"skipped and halves it, up to {skipped} of {args.train_iters}; --initial-loss-scale "
        f"{_USUAL_LOSS_SCALE} suits short runs"
    ]


def _dropped_in_slices(args: RunConfig) -> list[str]:
    """A line where experts count their capacity in slices."""
    if not (args.use_dpp and args.num_experts and args.moe_expert_capacity_factor):
        return []
    if args.dpp_slice_tokens == "off":
        return []
    return [
        f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor} counts the tokens of a "
        f"slice with --dpp-slice-tokens {args.dpp_slice_tokens}: experts drop other tokens than "
        "those of whole sequences, so losses are not theirs"
    ]


def _why_idle(args: RunConfig, field: dataclasses.Field[Any]) -> str | None:
    """The reason why a setting of ours has no effect in this run; None where it has one."""
    if args.deepspeed_zero_stage:
        return "has no effect with --deepspeed-zero-stage"
    if args.use_dpp:
        return None
    needs, value = field.metadata["needs"], getattr(args, f"dpp_{field.name}")
    if needs == "dpp":
        return "has no effect without --use-dpp"
    if needs != "nothing" and args.pipeline_model_parallel_size == 1:
        return "has no effect without a pipeline"
    if needs == "links" and args.dpp_transport == "auto":
        return "has no effect without --use-dpp or a --dpp-transport other than auto"
    if needs != "links" and value == "auto":
        return "auto has no effect without --use-dpp"
    return None


def rank_and_world() -> tuple[int, int]:
    """Rank and number of ranks of this process as torchrun set them; 0 and 1 without a launcher.

    Raises:
        ConfigError: a variable of the launcher is no number, or the rank is none of the ranks.
    """
    rank, world_size = _of_launcher("RANK", 0), _of_launcher("WORLD_SIZE", 1)
    require(rank < world_size, f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    return rank, world_size


def check_launcher(world_size: int) -> None:
    """Refuse other variables of a launcher with which the ranks cannot meet (ConfigError)."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _of_launcher(name, 0)
    require(
        world_size == 1 or "MASTER_ADDR" in os.environ,
        f"WORLD_SIZE={world_size} without MASTER_ADDR: start the ranks by torchrun, or name the "
        "host and the port of rank 0",
    )
    if "MASTER_ADDR" in os.environ:
        port = os.environ.get("MASTER_PORT", "")
        known = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16
        require(known, f"MASTER_PORT={port}: expected a port, 1 to 65535")


def _of_launcher(name: str, usual: int) -> int:
    text = os.environ.get(name, str(usual))
    known = text.isascii() and text.isdecimal() and len(text) < 10
    require(known, f"{name}={text}: expected a number, as torchrun sets it")
    return int(text)
