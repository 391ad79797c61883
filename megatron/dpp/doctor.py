"""``python -m megatron.dpp.doctor``: the same as ``megatron-dpp doctor``."""

import sys

from megatron.dpp.commands.doctor import main
from megatron.dpp.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
