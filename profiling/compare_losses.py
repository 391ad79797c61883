#!/usr/bin/env python
"""Compares the losses of the static and the dynamic schedule: ``megatron-dpp compare-losses``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("compare-losses", __file__)
