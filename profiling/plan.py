#!/usr/bin/env python
"""Plans the layers of each pipeline stage: ``megatron-dpp plan``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.errors import exit_with


def run() -> int:
    """Load the command, which needs packages."""
    from megatron.dpp.commands.plan import main

    return main(prog="plan.py")


if __name__ == "__main__":
    exit_with(run)
