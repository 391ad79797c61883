"""``python -m megatron.dpp.sim``: see ``cli.py``."""

from megatron.dpp.errors import exit_with
from megatron.dpp.sim.cli import main

exit_with(main)
