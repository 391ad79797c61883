#!/usr/bin/env python
"""Shows a traced run live: ``megatron-dpp monitor``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.commands.monitor import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(prog="monitor.py"))
