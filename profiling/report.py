#!/usr/bin/env python
"""Reports where the time of a traced run went: ``megatron-dpp report``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("report", __file__)
