"""``python -m megatron.dpp.sim``: see ``commands/sim.py``."""

from megatron.dpp.commands.sim import main
from megatron.dpp.errors import exit_with

exit_with(main)
