"""``megatron-dpp run SCRIPT ...``: run a Megatron-LM script, unmodified, with the dynamic pipeline.

    torchrun --nproc-per-node 8 -m megatron.dpp.run pretrain_gpt.py --use-dpp [its flags]

Settings of the dynamic pipeline are taken from the command line before the script reads it, and
from variables: ``USE_DPP=1``, and ``DPP_X`` for each ``--dpp-x``. A flag wins over its variable.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import contextlib
    import dataclasses
    import os
    import runpy
    import textwrap
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from megatron.dpp.command_line import (
        Parser,
        add_dpp_flags,
        dpp_config,
        flag_of,
        given_flags,
        refuse_unknown,
        renamed,
    )
    from megatron.dpp.config import missing_part, option_fields
    from megatron.dpp.errors import (
        BAD_USAGE,
        ConfigError,
        DppError,
        Naming,
        error_line,
        exit_with,
        print_error,
        require,
        said,
        tell_torchrun,
    )
    from megatron.dpp.processes import begin_program, sigint_held_back
    from megatron.dpp.schedule import find_policy
    from megatron.dpp.trace.host import HostTrace
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

_PROGRAM = "megatron-dpp run"
_SWITCHES = ("--use-dpp", "--dpp-strict", "--dpp-trace", "--dpp-trace-only")
_TRACE_VALUES = [field for field in dataclasses.fields(HostTrace) if field.name != "only"]
_STATES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _usage() -> str:
    """The help of the command."""
    names = " ".join(flag_of(field.name) for field in option_fields())
    return f"""\
usage: megatron-dpp run SCRIPT [SCRIPT'S FLAGS] [--use-dpp] [--dpp-*]
       torchrun ... -m megatron.dpp.run SCRIPT [the same]

Run a training script of Megatron-LM, unmodified, with a dynamic pipeline.

  --use-dpp      run the dynamic pipeline, not megatron-core's (USE_DPP=1)
  --dpp-strict   end with an error where megatron-core's schedule would run
  --dpp-trace    record what every rank does
                 (--dpp-trace-dir, --dpp-trace-interval, --dpp-trace-iterations)
  --dpp-trace-only  the same for the script's own schedule, without --use-dpp
  --metrics-file FILE  append a JSON line per step: loss, norm, ms, tokens
                 (scripts on megatron.training, with or without --use-dpp)

Settings, each also a variable (--dpp-policy: DPP_POLICY):
{textwrap.fill(names, 79, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}
A flag wins over its variable. docs/plugin.md describes what is honoured."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(add_help=False, allow_abbrev=False)
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--metrics-file", metavar="FILE")
    for field in _TRACE_VALUES:
        kind = type(field.default or "")
        parser.add_argument(f"--dpp-trace-{field.name}", type=kind, default=field.default)
    add_dpp_flags(parser)
    return parser


def flags_of_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """The flags that variables stand for.

    Raises:
        ConfigError: a switch is neither on nor off.
    """
    for dest, action in {action.dest: action for action in _parser()._actions}.items():
        name = dest.upper()
        if not environment.get(name) or "dpp" not in dest:
            continue
        flag, *off = action.option_strings
        if action.nargs != 0:
            yield f"{flag}={environment[name]}"
        else:
            yield from [flag] if is_on(name, environment) else off


def is_on(name: str, environment: Mapping[str, str], *, otherwise: bool = False) -> bool:
    """The state of a variable that is a switch; ``otherwise`` where it is not set.

    Raises:
        ConfigError: it is neither on nor off.
    """
    value = environment.get(name, "")
    require(not value or value.lower() in _STATES, f"{name}={value}: expected 1 or 0")
    return _STATES[value.lower()] if value else otherwise


def naming_of(words: Sequence[str], environment: Mapping[str, str]) -> Naming:
    """Names settings by their variables where these give them, else by flags."""
    flags = given_flags(_parser(), words)
    names = {
        field.name: f"DPP_{field.name.upper()}"
        for field in option_fields()
        if f"dpp_{field.name}" not in flags and environment.get(f"DPP_{field.name.upper()}")
    }
    return renamed(names, "=")


def take_flags(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the settings of the dynamic pipeline and the script's own flags.

    Raises:
        ConfigError: an unknown ``--dpp-*``, or a value of the wrong type.
    """
    parser, words = _parser(), [*flags_of_variables(environment), *words]
    given, rest = parser.parse_known_args(words)
    refuse_unknown(parser, [word for word in rest if word.startswith(("--dpp-", "--no-dpp-"))])
    if given.use_dpp and given.dpp_trace_only:
        raise ConfigError(
            "--dpp-trace-only records the script's own schedule: give --dpp-trace with --use-dpp"
        )
    spelled = given_flags(parser, words)
    if not given.use_dpp and environment.get("RANK", "0") == "0":
        _warn_of_idle(spelled, traces=given.dpp_trace_only)
    return given, rest


def _warn_of_idle(spelled: Mapping[str, str], *, traces: bool) -> None:
    """Name the flags that have no effect without the dynamic pipeline."""
    works = ("metrics_file", "dpp_trace") if traces else ("metrics_file",)
    idle = [flag for name, flag in spelled.items() if not name.startswith(works)]
    hint = " (--dpp-trace-only records the script's own schedule)" if "dpp_trace" in spelled else ""
    if idle:
        names = ", ".join(idle)
        print(f"{_PROGRAM}: warning: without --use-dpp no effect: {names}{hint}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script.

    Returns:
        0; 2 for bad flags or settings. The script's own exit status and errors are its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(_usage())
        return 0 if words else BAD_USAGE
    script, *flags = words
    naming = naming_of(flags, os.environ)
    try:
        require(Path(script).is_file(), f"{script}: no such script (it comes before its flags)")
        given, rest = take_flags(flags, os.environ)
        config = dpp_config(given)
        find_policy(config.policy)
        if given.use_dpp and (missing := missing_part(config.transport)):
            raise ConfigError(missing)
        _run(script, rest, plugin_arguments(given, naming), given.metrics_file)
    except DppError as error:
        if isinstance(error, ConfigError):
            tell_torchrun(error_line(error, _PROGRAM, naming), printed=True)
            return print_error(error, _PROGRAM, naming)
        error.args = (said(error, naming),)  # of the traceback
        raise
    return 0


def plugin_arguments(given: argparse.Namespace, naming: Naming) -> dict[str, Any]:
    """The arguments of :func:`megatron.dpp.plugin.install`; none where it is not wanted."""
    if not (given.use_dpp or given.dpp_trace_only):
        return {}
    traces = {
        field.name: getattr(given, f"dpp_trace_{field.name}")
        for field in dataclasses.fields(HostTrace)
    }
    trace = HostTrace(**traces) if given.dpp_trace or given.dpp_trace_only else None
    return {
        "config": dpp_config(given),
        "strict": given.dpp_strict,
        "trace": trace,
        "naming": naming,
    }


def _run(
    script: str, flags: Sequence[str], settings: dict[str, Any], metrics_file: str | None
) -> None:
    """Run ``script`` as ``python SCRIPT FLAGS`` does, with the plugin if ``settings`` has
    any. On a machine without a GPU megatron-core runs on the CPU.
    """
    sys.argv = [script, *flags]
    # Before anything of megatron-core is imported: the script's checkout comes first.
    sys.path.insert(0, str(Path(script).resolve().parent))
    with sigint_held_back():
        import torch

    with contextlib.ExitStack() as around:
        if not torch.cuda.is_available():
            from megatron.dpp.core import cpu

            around.callback(cpu.install(host=True).close)
        if settings:
            from megatron.dpp import plugin

            around.enter_context(plugin.installed(**settings))
        if metrics_file:
            from megatron.dpp.metrics import recording

            around.enter_context(recording(metrics_file))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    begin_program()
    exit_with(lambda: main(sys.argv[1:]))
