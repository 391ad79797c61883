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

TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
CONTEXT, EXPERT = "--context-parallel-size", "--expert-model-parallel-size"
_SHORT = {
    "--tp": TENSOR,
    "--pp": PIPELINE,
    "--chunks": CHUNKS,
    "--cp": CONTEXT,
    "--ep": EXPERT,
    "--batch-size": "--global-batch-size",
    "--max-steps": "--train-iters",
    "--num-gpus": "--gpus",
}
"""Options that are other names of flags."""
_COUNTS = ("gpus", "procs")
_TEXTS = (
    "model", "config", "data", "tokenizer", "run-dir", "resume-from", "load-hf", "save-hf", "gpu",
)  # fmt: skip
_SWITCHES = ("no-dpp", "fp32", "skip-bad-lines", "dry-run")
_OTHERS = ("mode", "arch", "zero-stage", "engine", "recompute")
NAMES = (*_SHORT, *(f"--{name}" for name in (*_COUNTS, *_TEXTS, *_SWITCHES, *_OTHERS)))
"""All options of ``train`` itself."""


def new_parser() -> argparse.ArgumentParser:
    """The parser of all modes; flags that it does not know are Megatron's."""
    parser = Parser(prog="train", add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--arch", choices=("gpt", "bert"), default="gpt")
    for name in _COUNTS:
        parser.add_argument(f"--{name}", type=int)
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3))
    parser.add_argument("--engine", choices=("megatron", "deepspeed"))
    parser.add_argument("--recompute", choices=("none", "selective", "full"))
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Flags]:
    """The options of ``train``, and all other flags, which are Megatron's.

    Raises:
        ConfigError: a wrong value, or an option of another mode.
    """
    options, rest = new_parser().parse_known_args(_now(argv))
    known = (*MODES, *_ALIASES)
    if options.mode not in known:
        hint = did_you_mean(options.mode, known)
        raise ConfigError(f"--mode {options.mode}{hint}: expected one of {', '.join(known)}")
    options.mode = _ALIASES.get(options.mode, options.mode)
    if options.mode != "zero" and (options.zero_stage is not None or options.engine):
        raise ConfigError("--zero-stage and --engine are options of --mode deepspeed")
    for name in (*_COUNTS, *_TEXTS):
        if getattr(options, name.replace("-", "_")) in (0, ""):
            raise ConfigError(f"--{name}: give a value above 0, or leave the option out")
    if options.procs is not None and (options.gpus or options.gpu):
        raise ConfigError("--procs and --gpus exclude each other: --procs is for the CPU")
    flags = from_argv(rest)
    options.given = {*flags}
    return options, flags


def _now(argv: Sequence[str]) -> list[str]:
    """A command line with other and earlier names of flags by those of now, without flags that are
    not needed any more."""
    words: list[str] = []
    dropped = False
    for word in argv:
        name, equals, value = word.partition("=")
        dropped = NOW[name] == "" if name in NOW else dropped and not is_flag(word)
        if not dropped:
            words.append((NOW | _SHORT).get(name, name) + equals + value)
    return words
