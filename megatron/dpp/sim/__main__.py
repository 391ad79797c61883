"""``python -m megatron.dpp.sim``: see ``command.py``."""

from megatron.dpp.errors import exit_with
from megatron.dpp.sim.command import main

exit_with(main)
