#!/usr/bin/env python
"""Reports where the time of a traced run went: ``megatron-dpp report``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.errors import exit_with


def run() -> int:
    """Load the command, which needs packages."""
    from megatron.dpp.commands.report import main

    return main(prog="report.py")


if __name__ == "__main__":
    exit_with(run)
