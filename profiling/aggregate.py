#!/usr/bin/env python
"""Merges the trace files of all ranks: ``megatron-dpp aggregate``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("aggregate", __file__)
