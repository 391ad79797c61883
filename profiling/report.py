#!/usr/bin/env python
"""Reports where the time of a traced run went: ``megatron-dpp report``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("report", __file__)
