"""``megatron-dpp plugin``: let every Python process of this environment find the plugin."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.safe_files import open_text_to_write

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
    if args.install_pth:
        with open_text_to_write(path) as file:
            file.write(PTH_LINE)
        print(f"{path}: written. Processes of this environment with USE_DPP=1 load the plugin")
    elif args.remove_pth:
        path.unlink()
        print(f"{path}: removed")
    else:
        print(f"{path}: {'installed' if path.is_file() else 'not installed (--install-pth)'}")
    return 0


main = command("megatron-dpp plugin", _parser, _run)
