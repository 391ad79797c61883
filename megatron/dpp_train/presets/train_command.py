"""``megatron-dpp train``: from a command line to one torchrun per node (docs/USAGE_GUIDE.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.dpp import __version__
from megatron.dpp.errors import BAD_USAGE, PROGRAM, ConfigError, DppError, print_error
from megatron.dpp_train.presets.options import HELP

PRESET = "--preset"
"""First word of a command line whose settings are those of a launch script."""


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp train") -> int:
    """Resolve, check and run; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(PROGRAM, prog)
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    if "--version" in words:
        print(f"megatron-dpp {__version__}")
        return 0
    try:
        return _train(words)
    except DppError as error:
        print_error(error)
        return BAD_USAGE  # nothing has begun, whatever the reason
    except BrokenPipeError:
        raise
    except OSError as error:  # of the run's directory, which it may lose
        return print_error(error)


def _train(words: Sequence[str]) -> int:
    if sys.version_info < (3, 12):
        version = ".".join(map(str, sys.version_info[:3]))
        raise ConfigError(
            f"{sys.executable} is Python {version}: Megatron's training loop needs 3.12 or newer "
            "(PYTHON=python3.12 bash tools/setup.sh)"
        )
    from megatron.dpp_train.presets import plan
    from megatron.dpp_train.presets.start import start

    if words[:1] == [PRESET]:
        return start(plan.of_recipe(words[1:], os.environ))
    return start(plan.of_options(words, os.environ))
