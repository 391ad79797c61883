#!/usr/bin/env python
"""Plans the layers of each pipeline stage: ``megatron-dpp plan``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("plan", __file__)
