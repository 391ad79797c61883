"""The options of ``train``: one parser, and a help of one screen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.dpp.command_line import Parser
from megatron.dpp.errors import ConfigError, did_you_mean
from megatron.dpp_train.presets.checks import NOW, is_flag
from megatron.dpp_train.presets.flags import Flags, from_argv

MODES = ("simple", "3d", "megatron", "zero", "auto")
_ALIASES = {"deepspeed": "zero"}

HELP = """\
usage: megatron-dpp train [--mode MODE] [options] [any flag of Megatron-LM]
  --mode auto       choose the layout for these devices (default)
  --mode simple     data parallel: every device holds the whole model
  --mode 3d         tensor x pipeline x data parallel, with a dynamic pipeline:
                    --tp N --pp N --chunks N (of a rank) --cp N --ep N
                    --no-dpp: megatron-core's static schedule
  --mode megatron   Megatron's flags alone decide
  --mode deepspeed  ZeRO: --zero-stage 0|1|2|3 --engine megatron|deepspeed
model     --model NAME|DIR (of configs/models; Hugging Face)  --arch gpt|bert
          --hidden-size N --num-layers N --config FILE.yaml (flag: value)
devices   --gpus N (per node)  --procs N (processes on the CPU)
steps     --batch-size N (all devices)  --micro-batch-size N  --seq-length N
          --max-steps N --lr X --fp16 --bf16 --fp32 --recompute selective|full
data      --data FILE.jsonl|PREFIX (default: the sample)  --skip-bad-lines
          --tokenizer gpt2|DIR|FILE|train:N|sample  --sft (chats)
files     --save DIR --save-interval N  --resume-from DIR  --run-dir DIR
          --load-hf DIR --save-hf DIR: from and to a Hugging Face model
plan      --dry-run: print estimate, flags and command, start nothing
          --gpu H100 --gpus N: plan for GPUs that are not here
example   megatron-dpp train --mode 3d --procs 2 --pp 2 --chunks 2
All flags: python pretrain_gpt.py --help. Guide: docs/USAGE_GUIDE.md"""

_COUNTS = ("tp", "pp", "chunks", "cp", "ep", "gpus", "procs", "batch-size", "max-steps")
_TEXTS = (
    "model", "config", "data", "tokenizer", "run-dir", "resume-from", "load-hf", "save-hf", "gpu",
)  # fmt: skip
_SWITCHES = ("no-dpp", "fp32", "skip-bad-lines", "dry-run")
_OTHERS = ("mode", "arch", "zero-stage", "engine", "recompute")
_OF_MODE = dict.fromkeys(_COUNTS[:5], "3d") | {"zero_stage": "deepspeed", "engine": "deepspeed"}
_MOST = 1 << 20
NAMES = tuple(f"--{name}" for name in (*_COUNTS, *_TEXTS, *_SWITCHES, *_OTHERS))
"""All options of ``train`` itself."""


def new_parser() -> argparse.ArgumentParser:
    """The parser of all modes; flags that it does not know are Megatron's."""
    parser = Parser(prog="train", add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--arch", choices=("gpt", "bert"), default="gpt")
    for name in _COUNTS:
        names = [f"--{name}", *(["--num-gpus"] if name == "gpus" else [])]
        parser.add_argument(*names, type=int)
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3))
    parser.add_argument("--engine", choices=("megatron", "deepspeed"), default="megatron")
    parser.add_argument("--recompute", choices=("none", "selective", "full"))
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Flags]:
    """The options of ``train``, and all other flags, which are Megatron's.

    Raises:
        ConfigError: a wrong value, or an option of another mode.
    """
    parser = new_parser()
    options, rest = parser.parse_known_args(_now(argv))
    known = (*MODES, *_ALIASES)
    if options.mode not in known:
        hint = did_you_mean(options.mode, known)
        raise ConfigError(f"--mode {options.mode}{hint}: expected one of {', '.join(known)}")
    options.mode = _ALIASES.get(options.mode, options.mode)
    given = vars(parser.parse_known_args([])[0])
    for name, mode in _OF_MODE.items():
        if getattr(options, name) != given[name] and _ALIASES.get(mode, mode) != options.mode:
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of --mode {mode}, not of "
                f"--mode {options.mode}"
            )
    for name in _COUNTS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1 <= value <= _MOST:
            raise ConfigError(f"--{name} {value}: expected a whole number from 1 to {_MOST}")
    for name in _TEXTS:
        if getattr(options, name.replace("-", "_")) == "":
            raise ConfigError(f"--{name} is empty: give a value, or leave the option out")
    if options.procs is not None and (options.gpus or options.gpu):
        raise ConfigError("--procs and --gpus exclude each other: --procs is for the CPU")
    flags = from_argv(rest)
    options.given = {*flags} | ({"--global-batch-size"} if options.batch_size else set())
    return options, flags


def _now(argv: Sequence[str]) -> list[str]:
    """A command line with flags of earlier versions by their names of now, without those that are
    not needed any more."""
    words: list[str] = []
    dropped = False
    for word in argv:
        name, equals, value = word.partition("=")
        dropped = NOW[name] == "" if name in NOW else dropped and not is_flag(word)
        if not dropped:
            words.append(NOW.get(name, name) + equals + value)
    return words
