#!/usr/bin/env python
"""Shows a run live: ``megatron-dpp monitor``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("monitor", __file__)
