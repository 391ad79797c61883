"""The command ``megatron-dpp``, also ``python -m megatron.dpp``: one table of sub-commands."""

from __future__ import annotations

import sys

try:
    import importlib
    import importlib.util
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import NoReturn

    from megatron.dpp import __version__
    from megatron.dpp.errors import ConfigError, did_you_mean, exit_with, print_error
    from megatron.dpp.processes import begin_program
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

_ENGINE, _TRAINER = "megatron.dpp.", "megatron.dpp_train."
COMMANDS = {
    "preprocess": (_TRAINER + "data.preprocess_command", "turn JSON lines into token files"),
    "convert": (
        _TRAINER + "hf.convert_command",
        "turn a Hugging Face model into a checkpoint, and back",
    ),
    "generate": (_TRAINER + "generate.generate_command", "print a model's answers to prompts"),
    "evaluate": (
        _TRAINER + "generate.evaluate_command",
        "print a model's perplexity, or its scores on tasks",
    ),
    "plan": (
        _TRAINER + "cost.plan_command",
        "choose layers per stage, chunks per rank and the memory cap",
    ),
    "run": (_ENGINE + "run", "run a Megatron-LM script of yours with the dynamic pipeline"),
    "plugin": (
        _ENGINE + "plugin_command",
        "let every process of this environment find the plugin (USE_DPP=1)",
    ),
    "sim": (_ENGINE + "sim_command", "simulate, compare and draw schedules"),
    "train": (_TRAINER + "presets.train_command", "train a model: choose a layout, start torchrun"),
    "monitor": (_ENGINE + "report.monitor_command", "show a run live"),
    "report": (
        _ENGINE + "report.report_command",
        "show curves of runs, and where the time of a traced one went",
    ),
    "runs": (_ENGINE + "report.runs_command", "list runs"),
    "aggregate": (
        _ENGINE + "report.aggregate_command",
        "merge the traces of all ranks for Perfetto",
    ),
    "bench": (_TRAINER + "bench_command", "run a benchmark of the source tree"),
    "doctor": (_ENGINE + "doctor", "print what this machine offers the transport"),
}
"""Sub-command -> (module with ``main(argv) -> int``, summary)."""


def usage() -> str:
    """The help of the command itself."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            *("usage: megatron-dpp COMMAND [ARGUMENTS]", "", *rows, ""),
            "megatron-dpp COMMAND --help. Pages: docs/index.md. Fine-tuning: docs/fine-tune.md",
        ]
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
        hint = did_you_mean(words[0], COMMANDS)
        wrong = f"unknown command {words[0]!r}{hint}: expected one of {', '.join(COMMANDS)}"
        return print_error(ConfigError(wrong), "megatron-dpp")
    try:
        command = _main_of(words[0])
    except MissingTrainer:
        wrong = f"{words[0]} is a command of the trainer: install megatron-dpp-train {__version__}"
        return print_error(ConfigError(wrong), "megatron-dpp")
    status: int = command(words[1:])
    return status


class MissingTrainer(Exception):
    """A command of the trainer was asked for, which is not installed."""


def _main_of(command: str) -> Callable[..., int]:
    name = COMMANDS[command][0]
    if name.startswith(_TRAINER) and importlib.util.find_spec(_TRAINER.rstrip(".")) is None:
        raise MissingTrainer
    module = importlib.import_module(name)
    main: Callable[..., int] = module.main
    return main


def door(command: str, script: str) -> NoReturn:
    """Run a sub-command as the program of a file of its own, whose name its messages have."""
    begin_program()
    exit_with(lambda: _main_of(command)(prog=Path(script).name))


def run() -> None:
    """Entry point of the console script."""
    begin_program()
    exit_with(main)


if __name__ == "__main__":
    run()
