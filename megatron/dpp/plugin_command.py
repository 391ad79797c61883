"""``megatron-dpp plugin``: let every Python process of this environment find the plugin."""

from __future__ import annotations

import argparse
import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import replacing

PTH_LINE = (
    'import os; any(map(os.environ.get, ("USE_DPP", "DPP_TRACE_ONLY"))) '
    'and __import__("megatron.dpp.autoload")\n'
)
"""The file's content: nothing is imported where neither variable is set."""


def pth_file() -> Path:
    """The file of this environment's site-packages that Python reads at each start."""
    return Path(sysconfig.get_path("purelib")) / "megatron_dpp_autoload.pth"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = new_parser(
        prog,
        "Let every Python process of this environment load the dynamic pipeline where USE_DPP=1 is "
        "set: for hosts whose workers have no setting that imports a module.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--install-pth", action="store_true", help="write the .pth file")
    which.add_argument("--remove-pth", action="store_true", help="remove it")
    return parser


def _run(args: argparse.Namespace) -> int:
    path = pth_file()
    there = path.is_file()
    if args.install_pth:
        with _changing(path, "--install-pth"), replacing(str(path)) as file:
            file.write(PTH_LINE.encode())
        print(f"{path}: written. Processes of this environment with USE_DPP=1 load the plugin")
    elif args.remove_pth:
        with _changing(path, "--remove-pth"):
            path.unlink(missing_ok=True)
        print(f"{path}: {'removed' if there else 'was not installed'}")
    else:
        print(f"{path}: {'installed' if there else 'not installed (--install-pth)'}")
    return 0


@contextlib.contextmanager
def _changing(path: Path, flag: str) -> Iterator[None]:
    """Name the flag in an error of the block."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{flag}: {path} cannot be changed ({error.strerror}); where {sys.prefix} is not "
            "yours, take an environment of your own (python -m venv DIR)"
        ) from error


main = command("megatron-dpp plugin", _parser, _run)
