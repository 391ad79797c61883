#!/usr/bin/env python
"""Turns JSON lines into the token files that training reads: ``megatron-dpp preprocess``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("preprocess", __file__)
