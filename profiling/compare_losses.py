#!/usr/bin/env python
"""Compares the losses of the static and the dynamic schedule: ``megatron-dpp compare-losses``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.commands.compare_losses import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(prog="compare_losses.py"))
