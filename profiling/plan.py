#!/usr/bin/env python
"""Plans the layers of each pipeline stage: ``megatron-dpp plan``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("plan", __file__)
