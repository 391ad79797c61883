#!/usr/bin/env python
"""Merges the trace files of all ranks: ``megatron-dpp aggregate``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("aggregate", __file__)
