#!/usr/bin/env python
"""Shows a traced run live: ``megatron-dpp monitor``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("monitor", __file__)
