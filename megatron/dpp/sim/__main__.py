"""``python -m megatron.dpp.sim``: see ``sim_command.py``."""

from megatron.dpp.errors import exit_with
from megatron.dpp.sim_command import main

exit_with(main)
