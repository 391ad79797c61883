"""``python -m megatron.dpp.run SCRIPT ...``: the same as ``megatron-dpp run``, for torchrun."""

import sys

from megatron.dpp.commands.run import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
