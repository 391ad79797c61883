"""Runs ``train_script.py`` under ``megatron.dpp.run``, with the flags of the command line."""

import os
import sys
from pathlib import Path

from megatron.dpp import run

if __name__ == "__main__":  # processes of a checkpoint import this file, too
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.exit(run.main([str(Path(__file__).with_name("train_script.py")), *sys.argv[1:]]))
