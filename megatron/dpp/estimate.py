"""``python -m megatron.dpp.estimate``: the same as ``megatron-dpp estimate``."""

import sys

from megatron.dpp.commands.estimate import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
