#!/usr/bin/env python
"""Merges the trace files of all ranks: ``megatron-dpp aggregate``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.errors import exit_with


def run() -> int:
    """Load the command, which needs packages."""
    from megatron.dpp.commands.aggregate import main

    return main(prog="aggregate.py")


if __name__ == "__main__":
    exit_with(run)
