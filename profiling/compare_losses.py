#!/usr/bin/env python
"""Compares the losses of the static and the dynamic schedule: ``megatron-dpp compare-losses``."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from megatron.dpp.__main__ import door

if __name__ == "__main__":
    door("compare-losses", __file__)
