"""``python -m megatron.dpp.sim``: see ``cli.py``."""

import sys

from megatron.dpp.sim.cli import main

sys.exit(main())
