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
    "convert": (_TRAINER + "hf.convert_command", "turn Hugging Face models into checkpoints, back"),
    "train": (_TRAINER + "presets.train_command", "train a model: choose a layout, start torchrun"),
    "generate": (_TRAINER + "hf.generate_command", "print a model's answers to prompts"),
    "run": (_ENGINE + "run", "run a script on Megatron-LM with the dynamic pipeline"),
    "monitor": (_ENGINE + "report.monitor_command", "show a run live"),
    "report": (_ENGINE + "report.report_command", "show runs, and where a traced one's time went"),
    "aggregate": (_ENGINE + "report.aggregate_command", "merge the ranks' traces for Perfetto"),
    "sim": (_ENGINE + "sim_command", "simulate, compare and draw schedules"),
    "doctor": (_ENGINE + "doctor", "print what this machine offers, and switch the plugin on"),
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
    if is_of_trainer(words[0]) and importlib.util.find_spec(_TRAINER.rstrip(".")) is None:
        wrong = f"{words[0]} is a command of the trainer: install megatron-dpp-train {__version__}"
        return print_error(ConfigError(wrong), "megatron-dpp")
    return _main_of(words[0])(words[1:])


def is_of_trainer(command: str) -> bool:
    """True for a sub-command of the package of the trainer."""
    return COMMANDS[command][0].startswith(_TRAINER)


def _main_of(command: str) -> Callable[..., int]:
    main: Callable[..., int] = importlib.import_module(COMMANDS[command][0]).main
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
