#!/usr/bin/env python
"""Plans the layers of each pipeline stage: ``megatron-dpp plan``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.commands.plan import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(prog="plan.py"))
