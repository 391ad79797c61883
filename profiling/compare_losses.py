#!/usr/bin/env python
"""Compares the losses of the static and the dynamic schedule: ``megatron-dpp compare-losses``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.errors import exit_with


def run() -> int:
    """Load the command, which needs packages."""
    from megatron.dpp.commands.compare_losses import main

    return main(prog="compare_losses.py")


if __name__ == "__main__":
    exit_with(run)
