"""The command line of ``train``: one parser, and a help of one screen for each mode."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, did_you_mean
from megatron.dpp.flags import Parser
from megatron.dpp.sim.packing import PACKINGS
from megatron.dpp_train.cost.device import KNOWN_GPUS
from megatron.dpp_train.launch.flags import MODELS
from megatron.dpp_train.launch.layout import MOST
from megatron.dpp_train.options.flags_run import OVERLONG

MODES = ("simple", "3d", "megatron", "zero", "auto")
_ALIASES = {"deepspeed": "zero"}

ABOUT = {
    "simple": "Data parallel: every device holds the whole model.",
    "3d": "Tensor x pipeline x data parallel, with a dynamic pipeline.",
    "megatron": "Flags of pretrain_gpt.py, or --config FILE, choose the layout.",
    "zero": "Replicas shard optimizer (1), gradients (2) or parameters (3).",
    "auto": "Chooses layout and micro-batch size for these devices; says why.",
}
_OF_MODE = {
    "--tp": ("3d",),
    "--pp": ("3d",),
    "--chunks": ("3d",),
    "--cp": ("3d",),
    "--ep": ("3d",),
    "--no-dpp": ("3d", "auto"),
    "--recompute": ("simple", "3d", "zero"),
    "--zero-stage": ("zero",),
    "--engine": ("zero",),
    "--micro-batch-size": ("simple", "3d", "zero", "megatron"),
}


@dataclass(frozen=True)
class _Option:
    """A flag of ``train`` and how ``--help`` shows it."""

    name: str
    kind: type | None
    help: str
    metavar: str | None = None
    choices: tuple[str | int, ...] | None = None


_PRECISION = "(default: fp32 on CPUs, fp16 on V100 and T4, else bf16)"
_FIGURES = "of a device (default: as found)"
_OPTIONS = (  # neighbours of one help share a line of it
    _Option("--arch", str, "family of models (default gpt)", choices=("gpt", "bert")),
    _Option("--model", str, "a file of configs/models, or a Hugging Face model's folder", "NAME"),
    _Option("--config", str, "YAML file of Megatron's flags; wins over --model", "FILE"),
    _Option("--gpus", int, "GPUs of each node (default: all); --num-gpus too", "N"),
    _Option("--procs", int, "processes of each node, on the CPU (default 2)", "N"),
    _Option("--tp", int, "tensor parallel size", "N"),
    _Option("--pp", int, "pipeline parallel size", "N"),
    _Option("--chunks", int, "model chunks (virtual stages) of a pipeline rank", "N"),
    _Option("--cp", int, "context parallel size: ranks that share a sequence", "N"),
    _Option("--ep", int, "expert parallel size: ranks that share a layer's experts", "N"),
    _Option("--no-dpp", None, "megatron-core's static schedule, not the dynamic one"),
    _Option("--zero-stage", int, "ZeRO stage; 0: nothing (default 1)", choices=(0, 1, 2, 3)),
    _Option("--engine", str, "ZeRO engine (default megatron)", choices=("megatron", "deepspeed")),
    _Option("--recompute", str, "activations to recompute", choices=("none", "selective", "full")),
    _Option("--hidden-size", int, "width of the model", "N"),
    _Option("--num-layers", int, "depth of the model", "N"),
    _Option("--seq-length", int, "tokens of a sample", "N"),
    _Option("--batch-size", int, "samples of an iteration over all devices", "N"),
    _Option("--micro-batch-size", int, "samples of one device in one pass", "N"),
    _Option("--max-steps", int, "iterations (default 50)", "N"),
    _Option("--lr", float, "highest learning rate", "X"),
    _Option("--fp16", None, _PRECISION),
    _Option("--bf16", None, _PRECISION),
    _Option("--fp32", None, _PRECISION),
    _Option("--data", str, "JSON lines, or a prefix of token files (default: the sample)", "PATH"),
    _Option("--tokenizer", str, "of --data: gpt2, DIR_OR_FILE, train:N or sample", "T"),
    _Option("--skip-bad-lines", None, "leave out lines of --data that cannot be used"),
    _Option("--save", str, "write checkpoints here, at least one at the end", "DIR"),
    _Option("--run-dir", str, "log, settings, metrics, traces (default runs/DATE-...)", "DIR"),
    _Option("--resume-from", str, "go on from the checkpoint in here", "DIR"),
    _Option("--tflops", float, _FIGURES, "T"),
    _Option("--memory", float, _FIGURES, "GiB"),
    _Option("--bandwidth", float, _FIGURES, "GB/s"),
    _Option(
        "--gpu", str, "with --dry-run: plan for 8 (or --gpus) of these: H100, H200, ...", "NAME"
    ),
    _Option("--dry-run", None, "print the flags and the torchrun command, start nothing"),
)

NAMES = ("--mode", *(option.name for option in _OPTIONS))
"""All options of ``train`` itself."""

_OF_SCRIPT = (
    ("--load-hf DIR --save-hf DIR", "start from a Hugging Face model; write one at the end"),
    ("--sft", "fine-tune on chats; answers alone have a loss"),
    ("--variable-length", "a sample is a whole document, of any length up to --seq-length"),
    (f"--packing {'|'.join(PACKINGS)}", "several sequences of --sft or --variable-length at once"),
    (f"--overlong {'|'.join(OVERLONG)}", "what is done with documents above --seq-length"),
    ("--save-interval N", "iterations between checkpoints"),
    ("--metrics-file FILE", "a JSON line per iteration (default: in --run-dir)"),
    ("--trace", "record what every rank does, for megatron-dpp report"),
)
"""Flags of the training scripts that most users want -> their help."""
_REST = "All flags: python pretrain_gpt.py --help. Guides: docs/USAGE_GUIDE.md, docs/fine-tune.md"

_COUNTS = ("--gpus", "--procs")
_FILES = ("--config", "--data", "--save", "--resume-from")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all modes; ``--help`` and ``--completion`` are answered before it."""
    parser = Parser(prog="train", add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", default="auto")
    for option in _OPTIONS:
        if option.kind is None:
            parser.add_argument(option.name, action="store_true", help=option.help)
        else:
            names = [option.name, *(["--num-gpus"] if option.name == "--gpus" else [])]
            kind, choices = option.kind, option.choices
            parser.add_argument(*names, type=kind, choices=choices, help=option.help)
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``train``, and all other words, which ``pretrain_*.py`` gets.

    Raises:
        ConfigError: a wrong value, or an option of another mode.
    """
    options, rest = build_parser().parse_known_args(argv)
    check_mode(options.mode)
    options.mode = _ALIASES.get(options.mode, options.mode)
    for name, modes in _OF_MODE.items():
        value = getattr(options, name[2:].replace("-", "_"))
        given = value is not None and value is not False
        if given and options.mode not in modes:
            raise ConfigError(
                f"{name} does not go with --mode {options.mode}; nearest: --mode {modes[0]}"
            )
    for name in ("gpus", "gpu"):
        if getattr(options, name) is not None and options.procs is not None:
            raise ConfigError(f"--{name} and --procs exclude each other: --procs is for the CPU")
    for option in _OPTIONS:
        value = getattr(options, option.name[2:].replace("-", "_"))
        if option.kind is int and not option.choices and value is not None and value < 1:
            raise ConfigError(f"{option.name} {value}: nearest possible: 1")
        if option.name in _COUNTS and value is not None and value > MOST:
            raise ConfigError(f"{option.name} {value}: nearest possible: {MOST}")
        if option.kind is str and value == "":
            raise ConfigError(f"{option.name} is empty: give a value, or leave the option out")
        if option.kind is float and value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option.name} {value:g}: must be above 0")
    return options, rest


def check_mode(mode: str) -> None:
    """Refuse a mode that does not exist (ConfigError)."""
    if mode not in (*MODES, *_ALIASES):
        hint = did_you_mean(mode, (*MODES, *_ALIASES))
        raise ConfigError(f"--mode {mode}{hint}: expected one of {', '.join((*MODES, *_ALIASES))}")


def help_text(mode: str | None = None) -> str:
    """The text of ``train --help``, or of one mode."""
    if mode is None:
        modes = "\n".join(f"  --mode {name:9s} {text}" for name, text in ABOUT.items())
        return f"""\
usage: megatron-dpp train --mode MODE [options] [any flag of pretrain_gpt.py]

{modes}

Without --mode: auto. First try megatron-dpp train --dry-run: it starts nothing.
Options of a mode:  megatron-dpp train --mode MODE --help
Fine-tuning:        megatron-dpp train --model DIR --load-hf DIR --tokenizer DIR --sft
                        --data CHATS --save-hf OUT
Completion:         eval "$(megatron-dpp train --completion bash)"
{_REST}"""
    mode = _ALIASES.get(mode, mode)
    lines = [f"usage: megatron-dpp train --mode {mode} [options] [any flag of pretrain_gpt.py]"]
    own = [option for option in _OPTIONS if mode in _OF_MODE.get(option.name, MODES)]
    rows = [
        (" ".join(map(_left, options)), text)
        for text, options in itertools.groupby(own, lambda option: option.help)
    ]
    lines += [ABOUT[mode], *(f"  {left:33s} {text}" for left, text in [*rows, *_OF_SCRIPT]), _REST]
    return "\n".join(lines)


def _left(option: _Option) -> str:
    if option.choices:
        return f"{option.name} {'|'.join(str(choice) for choice in option.choices)}"
    return f"{option.name} {option.metavar}" if option.metavar else option.name


_BEHIND_COMMAND = """
_train_behind_command() {
  [[ ${COMP_WORDS[1]} == *train ]] || return
  COMP_WORDS=("${COMP_WORDS[@]:1}")
  COMP_CWORD=$((COMP_CWORD - 1))
  _shtab_train
}
complete -o default -F _train_behind_command python python3 megatron-dpp ./megatron-dpp"""
"""Completes ``megatron-dpp train`` and ``python train`` in bash; shtab completes ``./train``."""


def _fish(parser: argparse.ArgumentParser) -> str:
    """Completions for fish, which shtab lacks: of ``train`` and of ``megatron-dpp train``."""
    lines = []
    for action in parser._actions:
        values = "" if action.nargs == 0 else " -x"
        if action.option_strings[0] in _FILES:
            values = " -r -F"
        elif action.choices:
            values = f" -x -a '{' '.join(str(choice) for choice in action.choices)}'"
        help_ = (action.help or "").replace("'", "\\'")
        names = " ".join(f"-l {name[2:]}" for name in action.option_strings)
        rest = f"{names}{values} -d '{help_}'"
        lines.append(f"complete -c train {rest}")
        lines.append(f"complete -c megatron-dpp -n '__fish_seen_subcommand_from train' {rest}")
    return "\n".join(lines)


def completion(shell: str) -> str:
    """A completion script for ``./train``, and in bash and fish for ``megatron-dpp train``.

    Raises:
        ConfigError: shtab has no script for the shell, or is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError("--completion: shtab is not installed; pip install shtab") from None
    shells = ("bash", "zsh", "fish", "tcsh")
    if shell not in shells:
        raise ConfigError(f"--completion {shell or 'SHELL'}: nearest possible: {', '.join(shells)}")
    parser = build_parser()
    models = tuple(sorted(path.stem for path in MODELS.glob("*.yaml")))
    known = {"--mode": (*MODES, *_ALIASES), "--model": models, "--gpu": KNOWN_GPUS}
    for action in parser._actions:
        name = action.option_strings[0]
        action.choices = known.get(name, action.choices)
        if name in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if shell == "fish":
        return _fish(parser)
    script: str = shtab.complete(parser, shell=shell)
    return script + (_BEHIND_COMMAND if shell == "bash" else "")
