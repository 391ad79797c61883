"""The spellings of settings on command lines: flags and variables.

The engine names a setting by its field (:func:`megatron.dpp.errors.setting`). A program that is
called from a command line hands one of these spellings to what prints.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.dpp.errors import Naming, Setting

_OLD_NAMES = {"workload": "--workload", "node_ips": "--node-ips"}
"""Fields of ``DppConfig`` -> flags that are older than it."""

_OWNERS = {"HostTrace": "--dpp-trace-", "install": "--dpp-"}
"""Owner of a setting -> how its flags begin."""


def flag_of(field_name: str) -> str:
    """The command line flag of a :class:`~megatron.dpp.config.DppConfig` field.

    >>> flag_of("activation_cap")
    '--dpp-activation-cap'
    """
    return _OLD_NAMES.get(field_name, flag_name(f"dpp_{field_name}"))


def flag_name(name: str) -> str:
    """The flag whose value argparse calls ``name``: ``--hidden-size`` for ``hidden_size``."""
    return "--" + name.replace("_", "-")


def in_flags(given: Setting) -> str:
    """A setting as a flag, with its value.

    >>> in_flags(Setting("DppConfig", "task_rng", False))
    '--no-dpp-task-rng'
    """
    if given.owner == "DppConfig":
        flag = flag_of(given.name)
    else:
        flag = _OWNERS[given.owner] + given.name.replace("_", "-")
    if given.value is False:
        return "--no-" + flag.removeprefix("--")
    return flag if given.value is ... or given.value is True else f"{flag} {given.value}"


def renamed(names: Mapping[str, str], joint: str = " ") -> Naming:
    """Flags, but for the settings that a program calls otherwise.

    Args:
        names: name of a setting -> what the program calls it.
        joint: stands between such a name and a value: ``=`` for variables.
    """

    def spell(given: Setting) -> str:
        name = names.get(given.name)
        if name is None:
            return in_flags(given)
        return name if given.value is ... else f"{name}{joint}{given.value}"

    return spell
