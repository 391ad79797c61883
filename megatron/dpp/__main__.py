"""The command ``megatron-dpp``, also ``python -m megatron.dpp``: one table of sub-commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron.dpp import __version__
from megatron.dpp.errors import exit_with

COMMANDS = {
    "preprocess": ("commands.preprocess", "turn JSON lines into token files"),
    "convert": ("commands.convert", "turn a Hugging Face model into a checkpoint, and back"),
    "generate": ("commands.generate", "print a model's answers to prompts"),
    "evaluate": ("commands.evaluate", "print a model's perplexity, or its scores on tasks"),
    "estimate": ("commands.estimate", "print the memory and time that a run will need"),
    "plan": ("commands.plan", "choose layers per stage, chunks per rank and the memory cap"),
    "run": ("commands.run", "run a Megatron-LM script of yours with the dynamic pipeline"),
    "sim": ("commands.sim", "simulate, compare and draw schedules"),
    "train": ("launch.door", "train a model: choose a layout, print it, start torchrun"),
    "monitor": ("commands.monitor", "show a traced run live"),
    "report": ("commands.report", "say where the time of a traced run went"),
    "plots": ("commands.plots", "draw a traced run as PNG files"),
    "aggregate": ("commands.aggregate", "merge the traces of all ranks for Perfetto"),
    "compare-losses": ("commands.compare_losses", "compare static and dynamic schedule bit by bit"),
    "bench": ("commands.bench", "run a benchmark of the source tree"),
    "env": ("commands.env", "print the environment variables that are read or set"),
    "doctor": ("commands.doctor", "print what this machine offers the transport"),
}
"""Sub-command -> (module under ``megatron.dpp`` with ``main(argv) -> int``, summary)."""


def usage() -> str:
    """The help of the command itself."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: megatron-dpp COMMAND [ARGUMENTS]", "", *rows, "", "megatron-dpp COMMAND --help"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        Its exit status; 2 for an unknown command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"megatron-dpp {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"megatron-dpp: unknown command {words[0]!r}: expected one of {', '.join(COMMANDS)}")
        return 2
    status: int = _main_of(words[0])(words[1:])
    return status


def _main_of(command: str) -> Callable[..., int]:
    module = importlib.import_module(f"megatron.dpp.{COMMANDS[command][0]}")
    main: Callable[..., int] = module.main
    return main


def door(command: str, script: str) -> NoReturn:
    """Run a sub-command as the program of a file of its own, whose name its messages have."""
    exit_with(lambda: _main_of(command)(prog=Path(script).name))


def run() -> None:
    """Entry point of the console script."""
    exit_with(main)


if __name__ == "__main__":
    run()
