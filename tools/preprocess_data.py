#!/usr/bin/env python
"""Turns JSON lines into the token files that training reads: ``megatron-dpp preprocess``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.errors import exit_with


def run() -> int:
    """Load the command, which needs packages."""
    from megatron.dpp.commands.preprocess import main

    return main(prog="preprocess_data.py")


if __name__ == "__main__":
    exit_with(run)
