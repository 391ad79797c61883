"""Training scripts on Megatron's own loop: ``gpt.py`` and ``bert.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(model: str) -> int:
    """Trains ``gpt`` or ``bert`` with the flags of the command line; returns the exit status."""
    from megatron.dpp import run
    from megatron.dpp_train.presets.checks import check_direct

    check_direct(sys.argv[1:])
    if "RANK" not in os.environ:  # started without torchrun: one process
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if not any("fsdp" in word for word in sys.argv):
        # Megatron insists on one hardware queue for tensor parallelism; with FSDP on several
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return run.main([str(Path(__file__).with_name(f"{model}.py")), *sys.argv[1:]])
