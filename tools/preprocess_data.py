#!/usr/bin/env python
"""Turns JSON lines into the token files that training reads: ``megatron-dpp preprocess``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("preprocess", __file__)
